"""The share of time that a job of very many ranks spends training, with recovery in memory and with restarts. Needs no
torch."""
