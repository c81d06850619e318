"""How much of the time a job of very many ranks trains, with recovery in memory and with restarts. Needs no torch."""
