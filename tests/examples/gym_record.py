"""Keeps the trees of successful episodes in mine.tree, with the tokenizer of MODEL, a Hugging Face folder.

python tests/examples/gym_record.py MODEL
python -m algos.sft model.path=MODEL data.path=mine.tree out=tuned
"""

import re
import sys

import gymnasium

import envs  # noqa: F401 - registers Harness-v0
from envs.gym.actions import words
from trees import codec

if len(sys.argv) != 2:
    sys.exit(__doc__)
model = sys.argv[1]
env = gymnasium.make("Harness-v0", tokenizer=model, context=1024)
with open("mine.tree", "wb") as file:  # noqa: PTH123
    for seed in range(40):
        observation, info = env.reset(seed=seed)
        command = re.sub(r"Move (\S+) to (\S+)\.", r"mv \1 \2", observation["messages"][-1]["text"])
        env.step(words("", [("execute_bash", {"command": command})]))
        _, reward, *_, info = env.step(words("Done."))
        if reward == 1.0:
            codec.write(file, [info["tree"]])
env.close()
