"""The harness as an environment: its model requests are observations, the answers to them are actions."""
