"""Files: missing, torn, not allowed, no room for them."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

_PUSH = "clusterctl push SRC DEST brings data, models and code to every node; clusterctl check compares shared folders"
_ALONE = "; the other nodes found it"

CAUSES = (
    Cause(
        id="disk.full",
        says="no room left on the disk[ while {path} was written]",
        fix=(
            "df -h and df -i on that node show which; clusterctl prune removes old releases",
            (
                "save_total_limit keeps fewer checkpoints, save_only_model: true smaller ones (without "
                "the optimizer: they "
                "cannot be resumed from)"
            ),
            "clusterctl resume RUN goes on from the newest complete checkpoint; a torn one is skipped",
        ),
        source="recorded (torch.save to a full tmpfs)",
        lines=(
            r"\[Errno 28\] No space left on device: '(?P<path>[^']+)'",
            r"[Nn]o space left on device",
            r"PytorchStreamWriter failed writing file \S+ file write failed",
            r"unexpected pos \d+ vs \d+",
            r"write\(\): fd \d+ failed with No space",
        ),
        events=({"event": "notice", "text": r"No space left on device"},),
    ),
    Cause(
        id="disk.quota",
        says="the user's quota on that disk is used up",
        fix=(
            "quota -s on that node; remove old checkpoints, or train into another folder (output_dir)",
            "save_total_limit keeps fewer checkpoints",
        ),
        source="https://man7.org/linux/man-pages/man3/errno.3.html",
        lines=(r"[Dd]isk quota exceeded",),
    ),
    Cause(
        id="files.many",
        says="too many open files",
        fix=(
            (
                "raise the limit where the run starts: services: limits: in the inventory, then log in anew "
                "(clusterctl check: lim.nofile)"
            ),
            "torch.multiprocessing.set_sharing_strategy('file_system') in the script, or fewer dataloader workers",
        ),
        source="https://github.com/zju3dv/NeuralRecon/issues/91",
        lines=(r"Too many open files",),
    ),
    Cause(
        id="hub.offline",
        says="something is to come from the hub, which cannot be reached[: {name}]",
        fix=(
            "model_name_or_path and dataset as folders that are on every node: clusterctl push SRC DEST",
            (
                "a name such as Qwen/Qwen2.5-7B is looked for in the hub; a path that does not exist is "
                "taken for such a name"
            ),
        ),
        source="recorded (transformers with HF_HUB_OFFLINE=1)",
        lines=(
            r"OfflineModeIsEnabled",
            r"LocalEntryNotFoundError",
            (
                r"We couldn't connect to 'https?://\S+' to load (?:this file|the files), .*?(?:like|that) "
                r"(?P<name>\S+) is not"
            ),
            r"We couldn't connect to 'https?://",
            r"(?P<name>\S+) is not a local folder and is not a valid model identifier",
            r"Repo id must be in the form",
            r"Incorrect path_or_model_id: '?(?P<name>[^'.]*)",
            r"Couldn't reach '?(?P<name>[^' ]+)'? on the Hub",
            r"outgoing traffic has been disabled",
        ),
        alone="; the other nodes have it",
    ),
    Cause(
        id="model.files",
        says="the model's folder lacks {name}",
        fix=("the folder is not whole: compare it with the source, and " + _PUSH,),
        source="recorded (transformers, a folder without its weights)",
        lines=(
            r"(?:does not appear to have|no) (?:a )?file named (?P<name>[\w.\-]+)",
            r"(?P<name>\w*[Tt]okenizer\w*) (?:is required|cannot be instantiated|class .* does not exist)",
            r"Can't load (?P<name>tokenizer|image processor|feature extractor|the configuration) (?:for|of)",
        ),
        alone=_ALONE,
    ),
    Cause(
        id="dataset.unknown",
        says="the dataset {name} is not in dataset_info.json",
        fix=(
            (
                "dataset_dir must be the folder of the dataset_info.json that has it, given relative to "
                "the configuration "
                "or as an absolute path on the nodes"
            ),
            'an entry there: {"NAME": {"file_name": "NAME.json"}}',
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/7703",
        lines=(r"Undefined dataset (?P<name>\S+) in ",),
    ),
    Cause(
        id="dataset.empty",
        says="no example of the dataset can be used",
        fix=(
            "its format must be that of its entry in dataset_info.json (alpaca or sharegpt, names of the columns)",
            "answers that are longer than cutoff_len are dropped as a whole",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/2577",
        lines=(r"Cannot find valid samples", r"num_samples should be a positive integer value, but got num_samples=0"),
    ),
    Cause(
        id="template.unknown",
        says="there is no template {name}",
        fix=("template: must be one that this LLaMA-Factory knows, and the one of the model's family",),
        source="https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/data/template.py",
        lines=(r"Template (?P<name>\S+) does not exist", r"(?P<name>tokenizer\.chat_template) is not set"),
    ),
    Cause(
        id="file.denied",
        says="not allowed: {path}",
        fix=(
            "the user of the run must be able to read it, and to write where results go: ls -ld PATH on that node",
            "over NFS root of a client is nobody (root_squash): use an ordinary user",
        ),
        source="recorded (Python)",
        lines=(
            r"\[Errno 13\] Permission denied: '(?P<path>[^']+)'",
            r"\[Errno 1\] Operation not permitted: '(?P<path>[^']+)'",
        ),
        alone="; only on this node",
    ),
    Cause(
        id="file.readonly",
        says="the file system is read-only: {path}",
        fix=(
            (
                "a release is read-only on purpose: results and caches go elsewhere (output_dir, HF_HOME, "
                "TRITON_CACHE_DIR)"
            ),
            "a disk that has become read-only is failing: dmesg -T on that node",
        ),
        source="recorded (Python)",
        lines=(r"\[Errno 30\] Read-only file system: '(?P<path>[^']+)'",),
    ),
    Cause(
        id="file.share",
        says="a shared file system does not answer as it should: {why}",
        fix=(
            "clusterctl check (fs.stale, fs.mount) names mounts that are stale; mount it anew on that node",
            "two runs, or two nodes, must not write the same file",
        ),
        source="https://man7.org/linux/man-pages/man3/errno.3.html",
        lines=(
            (
                r"\[Errno (?:116|5|107|112)\] (?P<why>Stale file handle|Input/output error|Transport "
                r"endpoint is not connected"
                r"|Host is down)"
            ),
        ),
    ),
    Cause(
        id="file.missing",
        says="there is no file {path}",
        fix=(
            "relative paths in the configuration travel with the run, absolute ones must be on every node",
            _PUSH,
        ),
        source="recorded (Python)",
        lines=(
            r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^']+)'",
            r"FileNotFoundError: (?:Unable to find|Couldn't find|File not found:?|No such file:?) '?(?P<path>[^'\s]+)",
            r"ValueError: File (?P<path>\S+) not found",
            r"can't open file '(?P<path>[^']+)': \[Errno 2\]",
            r"FileNotFoundError: (?P<path>.+)",
        ),
        alone=_ALONE,
    ),
)
