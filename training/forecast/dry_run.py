"""The forecast of a run that --dry_run prints: size, memory, time and cost."""

from dataclasses import replace

from config import ResolvedTrainOptions
from data.loader import Mixture
from data.named_tokenizer import TOKENIZERS
from data.shards import MissingShards
from model.formats.checkpoint import Checkpoint
from model.gpt import GPT
from model.initial_weights import build_without_weights
from recipes import Recipe
from training.evaluator import Evaluator
from training.forecast.advice import advise, choose_micro_batch
from training.forecast.loss import describe_loss
from training.forecast.memory import USABLE_SHARE, Hardware, forecast_memory
from training.forecast.step_time import ASSUMED_UTILIZATION, StepForecast, forecast_step, step_flops
from training.minutes import plan_for_minutes
from training.run import check_space, refuse_overwriting
from training.start import init_checksum, open_initial
from training.summary import agreed_model_config, describe_run_epochs, describe_steps
from utils.devices import seconds_on_cpu
from utils.distributed import ALONE
from utils.launch import is_main_process
from utils.throughput import NETWORK_BANDWIDTH, plan_gpus

DOLLARS_PER_GPU_HOUR = 2.50  # rent of an H100, taken for all GPUs
LONG_HOURS = 100  # for longer runs on a CPU, describe_time names the demo


def print_forecast(
    options: ResolvedTrainOptions, recipe: Recipe, checkpoint: Checkpoint | None
) -> None:
    """Print the size, memory, time and cost of a run; only the main process prints.

    `checkpoint` is the checkpoint of --resume, None for a new run. Raises UserError for options,
    shards, weights, folders and benchmarks that the run would refuse, as far as this machine has
    the files.
    """
    # Not Process.is_main: a dry run does not connect the processes of torchrun.
    if not is_main_process():
        return
    if options.minutes is not None and checkpoint is None:  # a resumed run keeps its options
        options = plan_for_minutes(options, recipe)  # prints the choice
    hardware = Hardware.of(options)  # what --device names, with the number of processes
    # ALONE: only the main process gets here.
    initial = open_initial(options, checkpoint, ALONE)  # InitialModel; None: random weights
    data = open_data(options)  # by split: {"train": Mixture, "val": Mixture}; {} without shards
    if initial is None and not data:  # only the user knows the tokenizer of future shards
        print("note: GPT-2's vocabulary assumed; a smaller one makes a smaller model")
    if checkpoint is not None:
        # raises UserError if --init_from holds other weights than the resumed run began with
        init_checksum(options, checkpoint, initial, ALONE)
    stream = data["train"].stream if data else None  # TokenStream; open_data begins with "train"
    model_config = agreed_model_config(options, recipe, stream, initial)  # of `initial`, or new
    if options.micro_batch_size == "auto":
        micro_batch_size, sentence = choose_micro_batch(options, recipe, model_config, hardware)
        if sentence:  # on CUDA: "micro-batch 32, by forecast 12.34 GB of 80.00 GB free"
            print(sentence)
        options = replace(options, micro_batch_size=micro_batch_size)

    # Size of the model, and the devices. The model counts parameters and FLOPs.
    model = build_without_weights(GPT, model_config)  # on the device "meta", without memory
    plan = plan_gpus(options.device)  # (GPU, Launch) of a name such as 8xh100; else None
    data_parallel, _ = hardware.parallel_degrees(options)  # parts of the data
    # "19,073 steps of 524,288 tokens = ..."
    steps_text = describe_steps(options, hardware.count_micro_steps(options), data_parallel)
    device_name = hardware.device.type
    if plan is not None:  # not hardware.gpu, which is None if its peak in this dtype is not known
        gpu, _ = plan
        device_name = gpu.name
    print(f"{model.num_parameters():,} parameters; {steps_text} on {device_name}, {hardware.dtype}")

    bytes_by_use = forecast_memory(options, recipe, model_config, hardware)  # of one process
    fits = sum(bytes_by_use.values()) <= USABLE_SHARE * hardware.free_bytes  # 90 % of it
    print_memory(bytes_by_use, fits, hardware)

    # communication, and advice; the forecast is None if the speed of the device is not known
    forecast = forecast_step(options, model_config, hardware)
    # fraction of the peak FLOP/s; lower if a GPU waits for communication
    utilization = ASSUMED_UTILIZATION  # 0.4
    if forecast is not None and hardware.world_size > 1:
        print_sending(forecast)
        utilization *= forecast.compute_seconds / forecast.seconds
    # sending_seconds: of weights and gradients
    if not fits or (forecast is not None and forecast.sending_seconds > forecast.compute_seconds):
        # such as "the fastest that fits is --sharding zero1, 0.35 s a step"
        print(f"advice: {advise(options, recipe, model_config, hardware)}")

    print_time_and_cost(options, checkpoint, model, hardware, utilization)

    # Forecast the loss only of new models like those of the fit, which had GPT-2's tokens.
    has_gpt2_tokens = model_config.vocab_size == TOKENIZERS["gpt2"].vocab_size
    if options.init_from is None and has_gpt2_tokens:
        # one sentence, by a scaling law
        print(describe_loss(model.num_parameters(), options.total_batch_size * options.max_steps))
    if plan is None:  # a named GPU is in another machine, which has its own folders
        check_run_files(options, recipe, checkpoint, model, data)
    print("This was a dry run: nothing was trained or written.")
    # train.sh replaces this line; before a run it leaves out the line above, too. "val" is opened
    # last, so with it there are the shards of both splits.
    print(f"next: {describe_next(options, hardware, fits, 'val' in data)}")


def print_time_and_cost(
    options: ResolvedTrainOptions,
    checkpoint: Checkpoint | None,
    model: GPT,
    hardware: Hardware,
    utilization: float,
) -> None:
    """Print the FLOPs, time and cost of the steps after `checkpoint`; of all steps if it is None.
    The devices compute at the fraction `utilization` of their peak FLOP/s."""
    steps_left = options.max_steps - (checkpoint["step"] if checkpoint else 0)
    if steps_left == 0:
        print(f"the run is at its last step, {options.max_steps:,}: it would not go on")
        return
    num_tokens = options.total_batch_size * steps_left
    tokens_text = f"{num_tokens:,} tokens"
    if checkpoint:
        tokens_text = f"the {tokens_text} after step {checkpoint['step']:,}"
    flops_per_step = step_flops(options, model.config)  # on all devices, with recomputation
    # MFU counts each FLOP of the model only once, even if it is recomputed.
    mfu = utilization * model.flops_per_token() * options.total_batch_size / flops_per_step
    # ": 4.4 hours on 16 GPUs and ...", or "" for an unknown GPU
    time_text = describe_time(flops_per_step * steps_left, hardware, utilization, mfu)
    print(f"{model.flops_per_token() * num_tokens:.3g} FLOPs for {tokens_text}{time_text}")


def check_run_files(
    options: ResolvedTrainOptions,
    recipe: Recipe,
    checkpoint: Checkpoint | None,
    model: GPT,
    data: dict[str, Mixture],
) -> None:
    """Print the data folders of the run, and check its folders and benchmarks. Raises UserError if
    the run would overwrite files of another run, lacks disk space for its checkpoints, or cannot
    score a benchmark."""
    # train.sh reads these lines, and makes the shards of the default folder if they are missing
    for folder in options.data_dir:
        print(f"data_dir: {folder}")
    refuse_overwriting(options, checkpoint)
    # `recipe` has the optimizer, which decides how much state a checkpoint holds for a parameter
    check_space(options, recipe, model.num_parameters())
    if "val" in data:
        # The constructor opens, or downloads, the benchmarks. Nothing is evaluated here.
        Evaluator(options, model, data["val"], ALONE)


def open_data(options: ResolvedTrainOptions) -> dict[str, Mixture]:
    """Return a Mixture of the tokens of --data_dir by split, and print how often a run reads them.
    Without train shards return {}, without validation shards only "train", and print a note
    instead: the user may make them before the run."""
    data: dict[str, Mixture] = {}
    try:
        for split in ("train", "val"):
            data[split] = Mixture(options.data_dir, split, options.block_size)  # or MissingShards
        train_data = data["train"]
        epochs = describe_run_epochs(options, train_data)  # "0.53 epochs"
        print(f"{len(train_data.stream):,} train tokens: {epochs}")
    except MissingShards as error:
        # describe_next tells how to make the shards
        print(f"note: {error}" if data else "note: there are no shards yet")
    return data


def describe_next(
    options: ResolvedTrainOptions, hardware: Hardware, fits: bool, has_shards: bool
) -> str:
    """Return what the user can do after the dry run."""
    if not fits:
        return "other options, as the advice above says, and a dry run with them"
    if plan_gpus(options.device) is not None:  # a name such as 16xh100
        command = "the same command of train.py without --dry_run and --device, on such a machine"
        if hardware.world_size > 1:
            per_machine = hardware.processes_per_machine
            num_machines = -(-hardware.world_size // per_machine)  # rounded up
            command += f", by torchrun --nproc_per_node={per_machine} --nnodes={num_machines}"
            on_last_machine = hardware.world_size % per_machine  # 4 of 12xh100; 0: all are alike
            if on_last_machine > 0:
                command += f", on the last machine torchrun --nproc_per_node={on_last_machine}"
        return command
    command = "the same command of train.py without --dry_run"
    if has_shards:
        return command
    folder = options.data_dir[0]
    return f"python data/fineweb-edu.py --local_dir {folder} [--input YOUR_TEXT], then {command}"


def print_memory(bytes_by_use: dict[str, int], fits: bool, hardware: Hardware) -> None:
    """Print the memory forecast of one process, in bytes by use, and whether it fits."""
    print("peak memory of one process in GB, without Python, CUDA's context and dropout's masks:")
    for name, num_bytes in bytes_by_use.items():
        print(f"  {num_bytes / 1e9:8.2f}  {name}")
    needed_bytes = sum(bytes_by_use.values())
    fits_text = "fits" if fits else "does not fit"
    # only USABLE_SHARE of the free memory, because the forecast is not exact
    usable_bytes = USABLE_SHARE * hardware.free_bytes
    print(
        f"  {needed_bytes / 1e9:8.2f}  in all: {fits_text} {usable_bytes / 1e9:.2f} GB, "
        f"{USABLE_SHARE:.0%} of {hardware.free_bytes / 1e9:.2f} GB free"
    )


def print_sending(forecast: StepForecast) -> None:
    """Print the bytes that a GPU sends in a step, their time for each link, and the time of a step.
    A link without traffic gets no line, such as the network of a run on one machine."""
    print(f"a GPU sends in a step, beside {forecast.compute_seconds:.3f} s of compute:")
    for num_bytes, bandwidth, destination in (
        (forecast.machine_bytes, forecast.bandwidth, "within its machine"),
        (forecast.network_bytes, NETWORK_BANDWIDTH, "between machines"),
        (
            forecast.activation_bytes,
            forecast.bandwidth,
            "of activations, which the next layer waits for",
        ),
    ):
        if num_bytes > 0:
            traffic = f"{num_bytes / 1e9:8.2f} GB in {num_bytes / bandwidth:7.3f} s"
            print(f"  {traffic} {destination}, at {bandwidth / 1e9:.0f} GB/s")
    print(f"a step takes {forecast.seconds:.3f} s if weights and gradients are sent meanwhile")


def describe_time(flops: float, hardware: Hardware, utilization: float, mfu: float) -> str:
    """Return the end of a line: the time of `flops` FLOPs on all devices, and the cost of GPUs that
    compute at the fraction `utilization` of their peak. `flops` and `utilization` count what is
    recomputed; `mfu`, which is only printed, does not. Return "" for a GPU of unknown peak."""
    if hardware.device.type == "cpu":
        # seconds_on_cpu times a matmul, and assumes a fixed share of its rate
        hours = seconds_on_cpu(flops, hardware.dtype) / 3600
        # train.sh quotes the text between "about" and "on this processor"
        text = f": about {describe_hours(hours)} on this processor"
        return text if hours < LONG_HOURS else f"{text}; bash train.sh demo takes minutes"
    if hardware.gpu is None:
        return ""
    peak_flops = hardware.gpu.peak_flops  # FLOP/s
    gpu_hours = flops / (peak_flops * utilization) / 3600  # sum over all GPUs
    num_gpus = hardware.world_size
    gpus_text = "1 GPU" if num_gpus == 1 else f"{num_gpus:,} GPUs"
    return (
        f": {describe_hours(gpu_hours / num_gpus)} on {gpus_text} and "
        f"{gpu_hours * DOLLARS_PER_GPU_HOUR:,.2f} $, at {mfu:.0%} MFU of {peak_flops / 1e12:,.0f} "
        f"TFLOP/s and {DOLLARS_PER_GPU_HOUR:.2f} $ per GPU hour"
    )


def describe_hours(hours: float) -> str:
    """Return a time as text: in minutes, in hours, or in hours and days."""
    if hours < 1:
        return f"{max(0.1, 60 * hours):.1f} minutes"
    if hours < 48:
        return f"{hours:,.1f} hours"
    hours = float(f"{hours:.2g}")  # two digits, because a forecast is not exact
    return f"{hours:,.0f} hours ({hours / 24:,.0f} days)"
