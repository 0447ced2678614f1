"""Any model behind an OpenAI-compatible endpoint as the policy."""

import gymnasium
import openai

import envs  # noqa: F401 - registers Harness-v0
from envs.gym.chat import chat_action, chat_request

client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
env = gymnasium.make("Harness-v0", render_mode="ansi")
observation, info = env.reset(seed=1)
over = False
while not over:
    reply = client.chat.completions.create(model="policy", **chat_request(observation))
    observation, reward, terminated, truncated, info = env.step(chat_action(reply.choices[0].message))
    over = terminated or truncated
print(env.render())
env.close()
