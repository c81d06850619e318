"""What each rank did in a training cell, as a picture."""
