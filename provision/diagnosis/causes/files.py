"""Files: missing, unreadable, or without space on the disk."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "Files, disks, models, data"
ORDER = 80

_PUSH = "clusterctl push SRC DEST copies data, models and code to every node; clusterctl check compares shared folders"
_ALONE = "; the other nodes found it"

_MISSING = (
    r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^']+)'",
    r"FileNotFoundError: (?:Unable to find|Couldn't find|File not found:?|No such file:?) '?(?P<path>[^'\s]+)",
    r"ValueError: File (?P<path>\S+) not found",
    r"can't open file '(?P<path>[^']+)': \[Errno 2\]",
    r"FileNotFoundError: (?P<path>.+)",
)
UNSENT = Cause(
    id="file.unsent",
    says="{path}: git-ignored, so it was not sent",
    fix=(
        "run again with: clusterctl train --include {path} …",
        "or copy it to the nodes once, and give its absolute path there: clusterctl push {path} DEST",
    ),
    source="recorded (Python)",
    lines=_MISSING,
)

CAUSES = (
    Cause(
        id="disk.full",
        says="the disk is full[, seen while writing {path}]",
        fix=(
            "df -h and df -i on that node show which disk; clusterctl prune removes old releases",
            (
                "save_total_limit keeps fewer checkpoints; save_only_model: true makes them smaller, but a run cannot "
                "resume from them"
            ),
            "clusterctl resume RUN resumes from the newest complete checkpoint and skips a truncated one",
        ),
        source="recorded (torch.save to a full tmpfs)",
        lines=(
            r"\[Errno 28\] No space left on device: '(?P<path>[^']+)'",
            r"[Nn]o space left on device",
            r"Not enough disk space\. Needed",
            r"PytorchStreamWriter failed writing file \S+ file write failed",
            r"unexpected pos \d+ vs \d+",
            r"write\(\): fd \d+ failed with No space",
        ),
        events=({"event": "notice", "text": r"No space left on device"},),
    ),
    Cause(
        id="disk.quota",
        says="the user's disk quota is exceeded",
        fix=(
            "quota -s on that node; remove old checkpoints, or save to another folder (output_dir)",
            "save_total_limit keeps fewer checkpoints",
        ),
        source="https://man7.org/linux/man-pages/man3/errno.3.html",
        lines=(r"[Dd]isk quota exceeded",),
    ),
    Cause(
        id="files.many",
        says="too many open files",
        fix=(
            ("raise the limit: services: limits: in the inventory, then log in again (clusterctl check: lim.nofile)"),
            "torch.multiprocessing.set_sharing_strategy('file_system') in the script, or fewer dataloader workers",
        ),
        source="https://github.com/zju3dv/NeuralRecon/issues/91",
        lines=(r"Too many open files", r"received \d+ items of ancdata"),
    ),
    Cause(
        id="hub.offline",
        says="the program needs a download from the hub, which cannot be reached[: {name}]",
        fix=(
            "give model_name_or_path and dataset as folders that exist on every node: clusterctl push SRC DEST",
            ("a name such as Qwen/Qwen2.5-7B is looked up in the hub, and so is a path that does not exist"),
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
        id="model.class",
        says="the model needs {name}, which this transformers does not have",
        fix=(
            "pack an environment with the version of transformers in the model's config.json (transformers_version)",
            "older models name LLaMATokenizer: tokenizer_class in tokenizer_config.json is LlamaTokenizer today",
        ),
        source="https://github.com/huggingface/transformers/issues/22222",
        lines=(
            r"Tokenizer class (?P<name>\w+) does not exist or is not currently imported",
            r"model type `(?P<name>[^`]+)` but Transformers does not recognize this architecture",
            r"Unrecognized configuration class <class '(?P<name>[^']+)'>",
        ),
    ),
    Cause(
        id="model.files",
        says="the model's folder lacks {name}",
        fix=("the folder is incomplete: compare it with the source; " + _PUSH,),
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
                "dataset_dir must be the folder with the right dataset_info.json, relative to the configuration or "
                "as an absolute path on the nodes"
            ),
            'add an entry there: {"NAME": {"file_name": "NAME.json"}}',
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/7703",
        lines=(r"Undefined dataset (?P<name>\S+) in ",),
    ),
    Cause(
        id="dataset.empty",
        says="the dataset has no usable example",
        fix=(
            "its format must match its entry in dataset_info.json (alpaca or sharegpt, names of the columns)",
            "examples whose answer does not fit into cutoff_len are dropped",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/2577",
        lines=(r"Cannot find valid samples", r"num_samples should be a positive integer value, but got num_samples=0"),
    ),
    Cause(
        id="dataset.broken",
        says="the data set cannot be read as a table[: {why}]",
        fix=(
            (
                "a JSON file is a list of objects, a JSONL file an object in each line; every record has "
                "the same keys and types"
            ),
            "look for the first bad record: python -m json.tool FILE, or jq -c . FILE",
            "the columns in dataset_info.json must be the file's",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/1082",
        lines=(
            r"ArrowInvalid: (?P<why>.+)",
            r"ArrowTypeError: (?P<why>.+)",
            r"(?P<why>Not able to read records in the JSON file at \S+)",
            r"(?P<why>Please pass `features` or at least one example when writing data)",
        ),
    ),
    Cause(
        id="template.unknown",
        says="the template {name} does not exist",
        fix=("template: must be known to this LLaMA-Factory and belong to the model's family",),
        source="https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/data/template.py",
        lines=(r"Template (?P<name>\S+) does not exist", r"(?P<name>tokenizer\.chat_template) is not set"),
    ),
    Cause(
        id="file.denied",
        says="permission denied: {path}",
        fix=(
            "the run's user must be able to read it, and to write results: ls -ld PATH on that node",
            "NFS maps a client's root to nobody (root_squash): use an ordinary user",
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
            ("releases are read-only: put results and caches elsewhere (output_dir, HF_HOME, TRITON_CACHE_DIR)"),
            "a disk that became read-only is failing: dmesg -T on that node",
        ),
        source="recorded (Python)",
        lines=(r"\[Errno 30\] Read-only file system: '(?P<path>[^']+)'",),
    ),
    Cause(
        id="file.share",
        says="a shared file system failed: {why}",
        fix=(
            "clusterctl check (fs.stale, fs.mount) names stale mounts; mount the file system again on that node",
            "two runs, or two nodes, must not write the same file",
        ),
        source="https://man7.org/linux/man-pages/man3/errno.3.html",
        lines=(
            (
                r"\[Errno (?:116|5|70|107|112|121)\] (?P<why>Stale file handle|Input/output error|Transport "
                r"endpoint is not connected|Communication error on send|Remote I/O error"
                r"|Host is down)"
            ),
        ),
    ),
    Cause(
        id="file.missing",
        says="the file {path} does not exist",
        fix=(
            "files at relative paths in the configuration are sent with the run; absolute ones must be on every node",
            _PUSH,
        ),
        source="recorded (Python)",
        lines=_MISSING,
        alone=_ALONE,
    ),
    UNSENT,  # behind file.missing: the run's record makes one of the other (signs.py)
)
