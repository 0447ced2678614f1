"""The transparent agent loop: a harness of our own that runs in the sandbox and knows nothing of training.

Standard library only, relative imports only: it is also run from a copy of this folder inside the sandbox.
"""
