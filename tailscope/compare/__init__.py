"""Whether a change helped: two traces held against each other, and more than two as a sweep over load."""
