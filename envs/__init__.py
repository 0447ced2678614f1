"""What an episode is: tasks, harnesses and the protocols that they speak, sandboxes, and ``Harness-v0`` of Gymnasium.

Importing this registers the environment and loads nothing of it.
"""

from gymnasium.envs.registration import register, registry

if "Harness-v0" not in registry:
    # Gymnasium's passive checker breaks the steps after a first reset that failed.
    register(
        "Harness-v0",
        entry_point="envs.gym.env:HarnessEnv",
        vector_entry_point="envs.gym.vector:asynchronous",
        disable_env_checker=True,
    )
