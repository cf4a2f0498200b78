import pytest

# The judge of a storm is no test file; its assertions are to show what they compare.
pytest.register_assert_rewrite("tests.support.generators.faults")
