"""What runs in each rank of a notebook: a stock ipykernel that answers a few more messages."""
