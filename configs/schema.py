"""The settings of a run. Importing this module imports neither torch nor ray.

Each group belongs to the part that it is named after; ``configs/loader.py`` reads them from YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from configs.base import Config, Device
from configs.harness import AssignmentConfig, HarnessConfig, SpaceConfig
from configs.judge import JudgeConfig
from configs.learner import LearnerConfig
from configs.proxy import ProxyConfig


class ModelConfig(Config):
    """The policy."""

    path: Path | None = Field(
        None, description="Folder of a Hugging Face model; none: the tiny policy made by the cold start."
    )
    renderer: Literal["auto", "qwen3", "qwen3.5", "default"] = Field(
        "auto", description="How chats become tokens: a renderer by name, or found by the model's family."
    )


class ColdstartConfig(Config):
    """The tiny policy that a run begins with where no model is named."""

    kind: Literal["desk", "space", "primer"] = Field(
        "desk",
        description="desk: imitates a faulty expert at the desk tasks. space: does so in all harnesses of the "
        "transparent loop, with habits that depend on the harness. primer: on the Qwen3 vocabulary, knows the form of "
        "the harnesses' shell calls and nothing else, for tasks.builtin=word.",
    )
    level_chance: float = Field(
        0.35, ge=0, lt=1, description="kind=space: chance of the bad habit of each level that is not the base's."
    )
    pairs: int = Field(0, ge=0, le=90, description="kind=space: pairs of levels, of 90, with a bad habit of their own.")
    pair_chance: float = Field(0.8, ge=0, lt=1, description="kind=space: chance of the habit of a pair.")
    pair_seed: int = Field(0, ge=0, description="kind=space: which pairs, and which habits.")
    outside: list[str] = Field(
        [],
        max_length=4,
        description="kind=space: outside harnesses whose form is imitated too, such as mini_swe_agent.",
    )
    cache: Path = Field(
        Path("~/.cache/reins/coldstart"), description="Where finished cold starts are kept and found again."
    )
    seed: int | None = Field(None, ge=0, description="Seed of the cold start; none: the run's seed.")


class TaskPathConfig(Config):
    """Tasks of others, or of one's own."""

    path: Path | None = Field(
        None,
        description="Folder or file of tasks, in a format of `python -m envs.tasks --help`; none: built-in tasks.",
    )
    format: str | None = Field(None, description="Which format the path has; none: recognised by what lies there.")
    graded_by: Literal["any", "script"] = Field(
        "any", description="script: leave out the path's tasks whose grade needs a judge."
    )
    skip_bad: bool = Field(False, description="Leave broken tasks out instead of stopping.")
    limit: int | None = Field(None, ge=1, description="Use only the first so many tasks of the path.")


class TasksConfig(TaskPathConfig):
    """What is practised."""

    builtin: Literal["desk", "word"] = Field(
        "desk", description="Which built-in tasks: small file work, or one word to be written into a file."
    )
    heldout: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of the path's tasks kept for evaluation, at least one; by the seed."
    )
    families: list[str] | None = Field(None, min_length=1, description="Desk tasks: only these families.")
    level: int = Field(1, ge=1, le=2, description="Desk tasks: difficulty.")
    train: int = Field(512, ge=1, description="Built-in tasks: number to practise on.")
    partial_credit: bool = Field(False, description="Desk tasks: fractions instead of all or nothing.")


class DockerConfig(Config):
    """Containers as rooms, with sandbox.backend=docker."""

    image: str = Field(
        "", description="Image that the rooms have as their system; empty: ours, of `python -m envs.sandbox image`."
    )
    runtime: str = Field(
        "", description="The engine's runtime, such as runsc (gVisor) or kata; empty: the engine's default."
    )


class SandboxConfig(Config):
    """The rooms in which harnesses run."""

    backend: Literal["auto", "bubblewrap", "docker", "process"] = Field(
        "auto", description="auto takes bubblewrap where it works, else process (no isolation)."
    )
    docker: DockerConfig = Field(default_factory=lambda: DockerConfig())
    actors: int = Field(1, ge=1, description="Sandbox actors; their episodes run at the same time.")
    concurrency: int = Field(32, ge=1, description="Episodes at the same time in one actor.")
    pool: int = Field(
        4,
        ge=0,
        description="Rooms that one actor keeps ready, started before their task is known (bubblewrap only); 0: none.",
    )
    root: Path | None = Field(None, description="Where sandboxes keep their files; none: a temporary folder.")
    wall_s: float = Field(120.0, gt=0, description="Wall seconds that one harness may run.")
    cpu_s: float = Field(60.0, gt=0, description="CPU seconds of one process inside.")
    memory_mb: int = Field(
        2048,
        ge=64,
        description="Memory inside in MiB, /tmp included: of all processes together where control groups can be made, "
        "else of each.",
    )
    cpus: float = Field(
        0.0, ge=0, description="Cores that one sandbox may use, where control groups can be made; 0: no bound."
    )
    processes: int = Field(256, ge=8, description="Processes inside at the same time.")
    file_mb: int = Field(256, ge=1, description="Largest file that may be written, and all of /tmp, in MiB.")
    idle_s: float | None = Field(
        None, gt=0, description="Seconds without a model call and without output after which a harness is ended."
    )
    output_mb: int = Field(64, ge=1, description="MiB that a harness may print; its ends are kept, the rest is not.")
    disk_mb: int = Field(
        2048, ge=1, description="MiB of disk that workspace, home and /tmp of a sandbox may take together."
    )
    grade_s: float = Field(60.0, gt=0, description="Wall seconds that a grader may run.")
    retries: int = Field(2, ge=0, description="Fresh sandboxes for an episode that failed.")


class SGLangConfig(Config):
    """The SGLang server of an engine of kind ``sglang``."""

    python: Path | None = Field(
        None,
        description="Interpreter that has SGLang, which pins its own torch; none: REINS_SGLANG_PYTHON, else this one.",
    )
    url: str | None = Field(
        None,
        description="A server that runs already, with --skip-tokenizer-init and --incremental-streaming-output, and "
        "sees the same files; none: one is started per replica.",
    )
    tp: int = Field(1, ge=1, description="GPUs that share each layer (tensor parallel).")
    pp: int = Field(1, ge=1, description="Stages of layers on GPUs of their own (pipeline parallel).")
    dp: int = Field(1, ge=1, description="Copies of the model inside one server (data parallel).")
    args: list[str] = Field([], description="More options of the server; they win over those set by Reins.")
    start_s: float = Field(900.0, gt=0, description="Seconds in which a server must come up.")


class EndpointConfig(Config):
    """An OpenAI-compatible endpoint, for evaluation only: it tells no log-probabilities that could be trained on."""

    url: str = Field("http://127.0.0.1:8000/v1", description="Base URL, as the OpenAI clients take it.")
    model: str = Field("default", description="Name of the model there.")
    key_env: str = Field("OPENAI_API_KEY", description="Environment variable that holds the key, where one is needed.")
    timeout_s: float = Field(600.0, gt=0, description="Seconds that one answer may take.")
    retries: int = Field(4, ge=0, description="Further tries after 408, 409, 429, 5xx or a broken connection.")


class EngineConfig(Config):
    """What samples tokens."""

    kind: Literal["transformers", "sglang", "endpoint"] = Field(
        "transformers",
        description="transformers runs embedded, also on a laptop; sglang is a server of its own; endpoint is "
        "somebody else's, for evaluation only.",
    )
    replicas: int = Field(1, ge=1, description="Engines; a session stays with one, whose cache has its prefix.")
    gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs that Ray sets aside for a replica; none: as device and sglang.tp x pp x dp say.",
    )
    sglang: SGLangConfig = Field(default_factory=lambda: SGLangConfig())
    endpoint: EndpointConfig = Field(default_factory=lambda: EndpointConfig())

    threads: int = Field(1, ge=1, description="CPU threads of the engine.")
    slots: int = Field(96, ge=1, description="Sequences whose keys and values are held.")
    max_len: int = Field(1024, ge=32, description="Longest sequence in tokens, prompt and answer together.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number format of the weights.")
    device: Device = Field("cpu", description="cpu, cuda or cuda:N.")

    @property
    def each_gpus(self) -> float:
        """GPUs that Ray sets aside for a replica."""
        if self.gpus is not None:
            return self.gpus
        if not self.device.startswith("cuda") or self.sglang.url is not None:
            return 0
        return self.sglang.tp * self.sglang.pp * self.sglang.dp if self.kind == "sglang" else 1


class UpdateConfig(Config):
    """How engines come to new weights."""

    mode: Literal["between_tokens", "drain", "abort_and_resume"] = Field(
        "between_tokens",
        description="What running calls do: go on under the new weights, end first, or be cut and asked again from "
        "the tokens that they have.",
    )
    transport: Literal["disk", "tensor"] = Field(
        "disk", description="SGLang reads the published files itself, or is sent the tensors."
    )
    keep_cache: bool = Field(
        False, description="SGLang: go on with keys and values of older weights instead of computing them anew."
    )


class RolloutConfig(Config):
    """How many episodes a step learns from, and how they are sampled."""

    groups: int = Field(8, ge=1, description="Groups (task, harness) of a step.")
    group_size: int = Field(8, ge=1, description="Episodes of a group.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature in training.")


class AsyncConfig(Config):
    """How far rollouts may run ahead of the learner."""

    max_staleness: int = Field(
        1, ge=0, description="Steps by which a sampled token's policy may be behind the one trained; 0: in step."
    )


class TreesConfig(Config):
    """What becomes of an episode's calls."""

    max_leaves: int = Field(16, ge=1, description="Episodes with more leaves are dropped whole.")
    train_kinds: list[Literal["main", "subagent", "compaction", "after-compaction", "side"]] = Field(
        ["main"], min_length=1, description="Kinds of branches that are trained."
    )
    builders: int = Field(1, ge=1, description="Actors that build trees; each session has one of them.")
    builder_mb: int = Field(
        1024, ge=1, description="MiB that one builder holds of unfinished episodes; above it the proxy tells one again."
    )
    keep: Literal["train", "all"] = Field(
        "train",
        description="Whose trees are kept: all takes in those of evaluations, whose tasks are not to be trained.",
    )
    keep_steps: int | None = Field(None, ge=1, description="Steps whose trees stay on disk; none: all.")


class RewardConfig(Config):
    """From the grader's number to the reward."""

    clean_end: bool = Field(
        True, description="0 when the last answer was cut or could not be parsed, whatever the grader says."
    )
    flags: bool = Field(
        True, description="Note in an episode's record what in it is suspicious; never changes the reward."
    )


class EvalConfig(Config):
    """Measuring on tasks that are never trained."""

    every: int = Field(10, ge=0, description="Steps between evaluations; 0: only before and after.")
    tasks: int = Field(96, ge=1, description="Tasks of each evaluation set, before and after.")
    curve_tasks: int = Field(32, ge=1, description="Tasks of the evaluations in between.")
    sampled: bool = Field(True, description="Also at the training temperature, not only greedy.")
    wait: bool = Field(
        True,
        description="Training waits for the evaluations in between, which then see one version of the policy; false: "
        "it goes on, an evaluation sees new weights come, and its row says which versions.",
    )


class CheckpointConfig(Config):
    """What can be gone back to."""

    every: int = Field(5, ge=1, description="Steps between checkpoints; the last step always makes one.")
    keep: int = Field(3, ge=1, description="Newest checkpoints that stay on disk.")
    keep_best: int = Field(
        1, ge=0, description="Checkpoints of the highest greedy reward on held-out tasks that stay besides."
    )


class WandbConfig(Config):
    """Weights & Biases; a run never needs an account."""

    mode: Literal["offline", "online", "disabled"] = Field("offline", description="offline writes to the run folder.")
    project: str = Field("reins", description="Project name.")
    artifacts: bool = Field(
        True, description="At the end also the table of evaluations, the episodes and the trees, as artifacts."
    )


class RunConfig(Config):
    """Everything that determines a run."""

    name: str = Field(
        "quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Begins the name of the run folder."
    )
    dir: Path = Field(Path("runs"), description="Where run folders are made.")
    seed: int = Field(0, ge=0, description="Seed of tasks, schedule, sampling and learner.")
    steps: int = Field(60, ge=0, description="Training steps; 0 only evaluates.")
    model: ModelConfig = Field(default_factory=lambda: ModelConfig())
    coldstart: ColdstartConfig = Field(default_factory=lambda: ColdstartConfig())
    tasks: TasksConfig = Field(default_factory=lambda: TasksConfig())
    sandbox: SandboxConfig = Field(default_factory=lambda: SandboxConfig())
    harness: HarnessConfig = Field(default_factory=lambda: HarnessConfig())
    mix: list[HarnessConfig] = Field(
        [], description="Several harnesses in place of `harness`: every task is done in each, in groups of their own."
    )
    space: SpaceConfig | None = Field(
        None, description="A set of harnesses of the transparent loop in place of one; none: one, or those of `mix`."
    )
    assignment: AssignmentConfig = Field(default_factory=lambda: AssignmentConfig())
    proxy: ProxyConfig = Field(default_factory=lambda: ProxyConfig())
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    update: UpdateConfig = Field(default_factory=lambda: UpdateConfig())
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig())
    async_: AsyncConfig = Field(default_factory=lambda: AsyncConfig(), alias="async")
    trees: TreesConfig = Field(default_factory=lambda: TreesConfig())
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig())
    learner: LearnerConfig = Field(default_factory=lambda: LearnerConfig())
    judge: JudgeConfig | None = Field(
        None, description="Grades tasks that have a rubric; none: such tasks are an error."
    )
    eval: EvalConfig = Field(default_factory=lambda: EvalConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    wandb: WandbConfig = Field(default_factory=lambda: WandbConfig())

    @property
    def harnesses(self) -> dict[str, HarnessConfig]:
        """Those of the run by what logs call them: those of ``mix``, or the one of ``harness``."""
        return {one.known_as: one for one in self.mix or [self.harness]}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if len(self.harnesses) < len(self.mix):
            raise ValueError(
                f"mix: got {[one.known_as for one in self.mix]}, expected a label for each that tells it apart"
            )
        if self.mix and self.harness.name != "agent_loop":
            raise ValueError(
                f"harness.name: got {self.harness.name} beside mix, which stands in its place; name it in mix, "
                "or leave one of the two out"
            )
        if self.space is not None and (self.mix or self.harness.name != "agent_loop" or self.harness.label):
            raise ValueError(
                "space: got one beside mix, another harness than agent_loop, or a label; a space is of agent_loop, and "
                "its harnesses are called by their names; leave one of the two out"
            )
        if self.assignment.kind == "one_factor" and self.space is None:
            raise ValueError(
                "assignment.kind: got one_factor without a space, expected one: no other harness has factors"
            )
        if self.learner.minibatches > self.rollout.groups * self.rollout.group_size:
            raise ValueError(
                f"learner.minibatches: got {self.learner.minibatches}, expected at most rollout.groups * "
                f"rollout.group_size = {self.rollout.groups * self.rollout.group_size}; lower it or sample more"
            )
        if self.engine.kind != "sglang" and (self.update.keep_cache or self.update.transport != "disk"):
            raise ValueError(
                "update.keep_cache, update.transport: got a setting that only engine.kind=sglang has; leave them out"
            )
        if self.engine.kind == "endpoint" and self.steps:
            raise ValueError(
                f"engine.kind=endpoint: got steps={self.steps}, expected 0: an endpoint is for evaluation only, since "
                "its answers have no log-probabilities of a policy that could be trained"
            )
        others = set(self.trees.train_kinds) - {"main"}
        if bool(others) != (self.learner.aux_credit != "none"):
            raise ValueError(
                f"learner.aux_credit, trees.train_kinds: got {self.learner.aux_credit} and {self.trees.train_kinds}, "
                "expected a rule of credit (outcome or scaled) where other kinds than main are trained, and none else"
            )
        if self.learner.ranks > 1 and self.learner.device not in ("cpu", "cuda"):
            raise ValueError(
                f"learner.device: got {self.learner.device} with learner.ranks={self.learner.ranks}, expected cpu or "
                "cuda: every rank is given a GPU of its own"
            )
        behind = 2 * self.checkpoint.every + self.async_.max_staleness
        if self.trees.keep_steps is not None and self.trees.keep_steps < behind:
            raise ValueError(
                f"trees.keep_steps: got {self.trees.keep_steps}, expected at least 2 * checkpoint.every + "
                f"async.max_staleness = {behind}: a learner that restarts trains these steps again from their trees"
            )
        return self
