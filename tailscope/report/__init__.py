"""The page that people look at: a diagnosis, with what it was made from, as one HTML file that needs nothing else."""
