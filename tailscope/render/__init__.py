"""From a diagnosis to what a person or a program reads."""
