"""What the cells of studies compute: training runs, descents to a mean, and their data."""
