"""What Headwater offers to tests, its own and those of applications."""
