"""Published measurements of training runs, and the errors of the forecast on them."""
