"""What we rely on in the libraries below us."""
