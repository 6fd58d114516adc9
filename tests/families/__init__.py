"""One row a family: each module's `ROWS` joins the tests of `tests/test_families.py`."""
