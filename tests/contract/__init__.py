"""What we rely on in other libraries, beyond their documentation."""
