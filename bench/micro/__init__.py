"""Speed of single parts (pytest-benchmark); run by `make microbench`."""
