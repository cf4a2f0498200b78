import pytest

# The checks after a storm are not in a test file; their assertions must show what they compare.
pytest.register_assert_rewrite("tests.support.generators.faults")
