"""The process of each rank of a notebook: a stock ipykernel that answers a few more messages."""
