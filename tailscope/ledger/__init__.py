"""Where the time went: what a step costs, each request's bill, and what sets the tail apart."""
