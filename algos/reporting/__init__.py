"""The parts of ``python -m algos.report``: run folders to one page."""
