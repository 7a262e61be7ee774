"""Validates a LLaMA-Factory config and finds the files that it needs on the nodes.

A file at a *relative* path, relative to the config, is sent with the run. An *absolute* path is a path on the nodes.
The keys are those of LLaMA-Factory 0.9.5 (``llamafactory/hparams``) and of transformers' TrainingArguments.
"""

from __future__ import annotations

import difflib
import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.run.config_text import Document, json_problem, read, read_text
from provision.run.files import LIMIT, WORK, FileCollector, RunFiles
from trainer.agent.contract.untrusted import UntrustedError, parse_json

STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
MODELS = ("model_name_or_path", "ref_model", "reward_model", "kt_weight_path", "kt_expert_checkpoint_path")
ADAPTERS = ("adapter_name_or_path", "ref_model_adapters", "reward_model_adapters")  # one or several, with commas
FILES = ("deepspeed", "fsdp_config", "media_dir", "new_special_tokens_config", "hyper_parallel_args")
MAYBE = ("tokenized_path", "resume_from_checkpoint")  # sent if it exists; otherwise the run creates it
OUTPUTS = ("output_dir", "logging_dir", "cache_dir", "offload_folder", "profiler_output_dir", "swanlab_logdir")
TRAINER_LOG = "trainer_log.jsonl"
DATASET_INFO = "dataset_info.json"
_INFO = 16 << 20  # bytes of dataset_info.json
_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MEDIA = ("images", "videos", "audios")
_PATH, _NAME = 4000, 255  # bytes of a path and of a name in it; Linux takes 4,096 with the run's folder before it
_NO_HUB = "the nodes have no internet: give a local folder, or an absolute path on the nodes"


def config_files(
    config: Path,
    *,
    overrides: Sequence[str] = (),
    generated: Mapping[str, bytes] | None = None,
    limit: int = LIMIT,
    any_key: bool = False,
) -> RunFiles:
    """Read a training config and find all files that it needs.

    Args:
        config: the YAML file.
        overrides: ``KEY=VALUE`` as LLaMA-Factory takes them; they are written into the config that is sent.
        generated: generated files, by the name that the config or an override gives them; they are put next to it.
        limit: the most bytes to send.
        any_key: accept keys that look misspelled.

    Raises:
        UsageError: a mistake in the config, with its file, line and key; a file that is missing; too many bytes.
    """
    document = read(config, overrides)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", config.stem).lstrip("-.") or "train"
    collector = FileCollector(config.absolute().parent, frozenset({f"{WORK}/{name}.yaml"}))
    generated = generated or {}
    job = _Job(document, collector, {}, {f"{WORK}/{each}": data for each, data in generated.items()})
    job.check()
    notices = job.check_keys(any_key=any_key)
    for key in MODELS:
        job.model(key)
    for key in ADAPTERS:
        job.adapters(key)
    for key in FILES:
        job.file(key)
    for key in MAYBE:
        job.maybe(key)
    job.datasets()
    output = job.outputs()
    if document.data.get("do_train") is not True:
        notices.append(f"{config}: do_train is not set to true; LLaMA-Factory will not train")
    texts = job.texts | {f"{WORK}/{name}.yaml": document.rewritten(job.changes).encode()}
    return RunFiles(
        config=config,
        config_name=f"{name}.yaml",
        texts=texts,
        entries=tuple(entry for entry in collector.pack(limit) if entry.arcname not in texts),
        progress=posixpath.normpath(posixpath.join(WORK, output, TRAINER_LOG)),
        notices=tuple(notices),
        output=posixpath.normpath(posixpath.join(WORK, output)),
        settings=document.data,
        there=tuple(dict.fromkeys(job.there())),
    )


class MisspelledKeyError(UsageError):
    """A key that looks misspelled; ``train --force`` accepts it."""


@dataclass
class _Job:
    """One config while it is read. ``changes`` are values to replace in it, ``texts`` generated files."""

    document: Document
    collector: FileCollector
    changes: dict[str, str]
    texts: dict[str, bytes]
    read_there: list[str] = field(default_factory=list)  # absolute paths in dataset_info.json

    def check(self) -> None:
        data = self.document.data
        if "model_name_or_path" not in data:
            if "distributed_type" in data and "compute_environment" in data:
                raise UsageError(
                    f"{self.document.path} is an accelerate config, not a LLaMA-Factory config",
                    hint=f"clusterctl train --accelerate-config {self.document.path} SCRIPT.py",
                )
            if "stage" not in data:
                raise UsageError(
                    f"{self.document.path} is not a LLaMA-Factory config: it has neither stage nor model_name_or_path"
                )
            raise UsageError(f"{self.document.path}: model_name_or_path is missing")
        if data.get("stage", "sft") not in STAGES:
            stage, stages = _shown(data["stage"]), ", ".join(STAGES)
            raise UsageError(f"{self.document.where('stage')}: unknown stage {stage}; it must be one of {stages}")

    def check_keys(self, *, any_key: bool) -> list[str]:
        """Refuse a misspelled key. Returns a notice that names other keys which LLaMA-Factory does not have."""
        unknown = []
        for key in self.document.data:
            where = self.document.where(key)
            meant = misspelled(key)
            if meant is not None and not any_key:
                raise MisspelledKeyError(
                    f"{where}: LLaMA-Factory {VERSION} has no such key; did you mean {meant}?",
                    hint=f"write {meant}; if your release of LLaMA-Factory has {shown(key)}",
                )
            if meant is not None or not is_known(key):
                unknown.append(where)
        if not unknown:
            return []
        what = "no such key and may refuse it" if len(unknown) == 1 else "no such keys and may refuse them"
        return [f"{', '.join(unknown)}: LLaMA-Factory {VERSION} has {what}"]

    def text(self, key: str) -> str | None:
        """The value of ``key`` if it is the path of files to send. None for absolute paths and interpolations."""
        value = self.document.data.get(key)
        if value is None or isinstance(value, (bool, dict)):
            return None
        if not isinstance(value, str) or not value:
            raise UsageError(f"{self.document.where(key)}: {_shown(value)} is not a path")
        return value if self.is_sent(key, value) else None

    def is_sent(self, key: str, value: str) -> bool:
        self.check_path(key, value)
        if value.startswith("~"):
            raise UsageError(
                f"{self.document.where(key)}: LLaMA-Factory does not expand {value}",
                hint="write the absolute path on the nodes, or a path relative to the config",
            )
        return not value.startswith("/") and "${" not in value

    def check_path(self, key: str, value: str) -> None:
        """Refuse a name that no file can have, and characters that a log or a script would not show."""
        where = self.document.where(key)
        if not value.isprintable():
            raise UsageError(f"{where}: {shown(value)} contains a line break or a control character")
        if len(value.encode()) > _PATH or any(len(part.encode()) > _NAME for part in value.split("/")):
            raise UsageError(f"{where}: {shown(value)} is too long for a path")

    def local(self, value: str) -> Path:
        return Path(os.path.normpath(self.collector.base / value))

    def take(self, key: str, value: str) -> str:
        """Collect the file or folder that ``value`` names. Returns its path in the config on the nodes."""
        path = self.local(value)
        if not path.exists():
            self.missing(key, value)
        return self.named(value, self.collector.add(path, self.document.where(key)))

    def named(self, value: str, arcname: str) -> str:
        there = posixpath.relpath(arcname, WORK)
        return value if posixpath.normpath(value) == there and ".." not in value.split("/") else there

    def missing(self, key: str, value: str) -> None:
        where = self.document.where(key)
        elsewhere = Path.cwd() / value
        if elsewhere.exists() and elsewhere != self.local(value):
            raise UsageError(
                f"{where}: {value} does not exist in {self.collector.base}, but it exists in {Path.cwd()}",
                hint="relative paths are relative to the config: move the file there, or change the path",
            )
        if key in MODELS + ADAPTERS and _HUB_ID.fullmatch(value):
            raise UsageError(
                f"{where}: {value} is not in {self.collector.base}; it looks like a model of a hub", hint=_NO_HUB
            )
        raise UsageError(
            f"{where}: {value} does not exist in {self.collector.base}",
            hint="a relative path is relative to the config and sent with the run; an absolute path is on the nodes",
        )

    def change(self, key: str, value: str) -> None:
        if value != self.document.data.get(key):
            self.changes[key] = value

    def model(self, key: str) -> None:
        value = self.text(key)
        if value is not None and not value.startswith(("http://", "https://")):  # reward_model may be a server
            self.change(key, self.take(key, value))

    def adapters(self, key: str) -> None:
        value = self.document.data.get(key)
        if not isinstance(value, str):
            return
        names = [name.strip() for name in value.split(",")]
        there = [self.take(key, name) if self.is_sent(key, name) else name for name in names]
        if there != names:
            self.change(key, ",".join(there))

    def file(self, key: str) -> None:
        value = self.text(key)
        if value is not None and f"{WORK}/{value}" not in self.texts:
            self.change(key, self.take(key, value))

    def maybe(self, key: str) -> None:
        value = self.text(key)
        if value is not None and self.local(value).exists():
            self.change(key, self.take(key, value))

    def outputs(self) -> str:
        for key in OUTPUTS:
            value = self.text(key)
            if value is not None and posixpath.normpath(value).split("/")[0] == "..":
                raise UsageError(
                    f"{self.document.where(key)}: {value} is outside the run's folder",
                    hint="write a path inside it, or an absolute path on the nodes",
                )
        value = self.document.data.get("output_dir")
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{self.document.where('output_dir')}: {_shown(value)} is not a path")
        if value is not None and "${" in value:
            raise UsageError(
                f"{self.document.where('output_dir')}: clusterctl needs this path to find checkpoints, "
                f"and only the nodes can expand {value}",
                hint="write the path itself",
            )
        return value or "trainer_output"  # transformers' own default

    def there(self) -> Iterator[str]:
        """Absolute paths that the run reads on the nodes."""
        for key in (*MODELS, *ADAPTERS, *FILES, "dataset_dir"):
            value = self.document.data.get(key)
            names = value.split(",") if isinstance(value, str) and key in ADAPTERS else [value]
            for name in names:
                if isinstance(name, str) and name.strip().startswith("/") and "${" not in name:
                    yield posixpath.normpath(name.strip())
        yield from self.read_there

    def datasets(self) -> None:
        """``dataset_info.json`` and the files of the datasets that the config names."""
        named = [(key, name) for key in ("dataset", "eval_dataset") for name in self.names(key)]
        value = self.document.data.get("dataset_dir", "data")
        key = "dataset_dir"
        if value == "ONLINE" or str(value).startswith("REMOTE:"):
            raise UsageError(f"{self.document.where(key)}: {value} would download from a hub", hint=_NO_HUB)
        if not named or not isinstance(value, str) or not self.is_sent(key, value):
            return
        folder = self.local(value)
        if not (folder / DATASET_INFO).exists():
            self.missing(key, posixpath.join(value, DATASET_INFO))
        arcname = self.collector.place(folder)
        if key in self.document.data:
            self.change(key, self.named(value, arcname))
        info = self.info(folder / DATASET_INFO)
        written = dict(info)
        for by, name in named:
            if name not in info:
                known = ", ".join(map(shown, sorted(info)[:20])) or "none"
                raise UsageError(
                    f"{self.document.where(by)}: {shown(name)} is not in {folder / DATASET_INFO}; it has {known}",
                    hint="add it there, or correct the name",
                )
            written[name] = self.dataset(by, name, info[name], folder, arcname)
        if written == info:
            self.collector.add(folder / DATASET_INFO, self.document.where(key))
        else:
            self.texts[f"{arcname}/{DATASET_INFO}"] = json.dumps(written, indent=2, ensure_ascii=False).encode()
        if "media_dir" not in self.document.data and any(self.has_media(info[name]) for _, name in named):
            self.collector.add(folder, self.document.where(key))  # LLaMA-Factory looks for media there

    def names(self, key: str) -> list[str]:
        value = self.document.data.get(key)
        if value is None:
            return []
        if not isinstance(value, (str, list)):
            raise UsageError(f"{self.document.where(key)}: {_shown(value)} is not the name of a dataset")
        return [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value)]

    def info(self, path: Path) -> dict[str, Any]:
        text = read_text(path, limit=_INFO)
        try:
            info = parse_json(text, limit=_INFO)
        except UntrustedError as error:
            raise UsageError(json_problem(path, error)) from error
        if not isinstance(info, dict):
            raise UsageError(f"{path} is not a JSON object with an entry for each dataset")
        return info

    def has_media(self, entry: dict[str, Any]) -> bool:
        columns = entry.get("columns")
        return isinstance(columns, dict) and any(kind in columns for kind in _MEDIA)

    def dataset(self, key: str, name: str, entry: Any, folder: Path, arcname: str) -> dict[str, Any]:
        """One dataset's entry as the nodes need it."""
        where = f"{self.document.where(key)}: {name} in {folder / DATASET_INFO}"
        if not isinstance(entry, dict):
            raise UsageError(f"{where} is not a JSON object")
        source = next((field for field in ("file_name", "script_url") if isinstance(entry.get(field), str)), None)
        if source is None:
            kept = [str(entry[hub]) for hub in _HUBS if hub in entry]
            if kept and all(url.startswith("/") for url in kept):
                self.read_there += kept
                return entry
            what = f"comes from a hub ({kept[0]})" if kept else "has no file_name"
            raise UsageError(f"{where} {what}", hint="download it, and give the local file as file_name")
        there = {field: value for field, value in entry.items() if field not in _HUBS}  # a hub has precedence
        value = entry[source]
        self.check_path(key, value)
        if not value.startswith("/"):
            path = Path(os.path.normpath(folder / value))
            if not path.exists():
                raise UsageError(f"{where}: {path} does not exist")
            if not (path.is_relative_to(folder) and ".." not in Path(value).parts):
                there[source] = posixpath.relpath(self.collector.place(path), arcname)
            self.collector.add(path, self.document.where(key))
        else:
            self.read_there.append(posixpath.normpath(value))
        return there


def _shown(value: object) -> str:
    """A value as a message quotes it."""
    return shown(repr(value))


# --- LLaMA-Factory's keys --------------------------------------------------------------------------
# From the dataclasses of LLaMA-Factory 0.9.5 (``llamafactory/hparams``: model, data, training, finetuning and
# generating arguments) and of transformers 5.6 (``Seq2SeqTrainingArguments``). A test compares them with the
# installed packages.


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


VERSION = "0.9.5"
KEYS = _names(
    "accelerator_config adam_beta1 adam_beta2 adam_epsilon adapter_folder adapter_name_or_path "
    "add_special_tokens add_tokens additional_target apollo_layerwise apollo_proj apollo_proj_type apollo_rank "
    "apollo_scale apollo_scale_front apollo_scale_type apollo_target apollo_update_interval asft_alpha "
    "audio_sampling_rate auto_find_batch_size average_tokens_across_devices badam_mask_mode badam_mode "
    "badam_start_block badam_switch_interval badam_switch_mode badam_update_ratio badam_verbose "
    "batch_eval_metrics bf16 bf16_full_eval buffer_size cache_dir compute_accuracy create_new_adapter "
    "crop_to_patches cutoff_len data_seed data_shared_file_system dataloader_drop_last dataloader_num_workers "
    "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset dataset_dir "
    "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout "
    "debug deepspeed default_system disable_gradient_checkpointing disable_shuffling disable_tqdm do_eval "
    "do_predict do_sample do_train double_quantization dpo_label_smoothing eaft_alpha early_stopping_steps "
    "enable_jit_checkpoint enable_liger_kernel enable_thinking enable_torch_profiler eval_accumulation_steps "
    "eval_dataset eval_delay eval_do_concat_batches eval_num_beams eval_on_each_dataset eval_on_start eval_steps "
    "eval_strategy eval_use_gather_object export_device export_dir export_hub_model_id export_legacy_format "
    "export_quantization_bit export_quantization_dataset export_quantization_maxlen export_quantization_nsamples "
    "export_size finetuning_type flash_attn fp16 fp16_full_eval fp8 fp8_backend "
    "fp8_enable_fsdp_float8_all_gather freeze_extra_modules freeze_language_model freeze_multi_modal_projector "
    "freeze_trainable_layers freeze_trainable_modules freeze_vision_tower fsdp fsdp_config full_determinism "
    "galore_layerwise galore_proj_type galore_rank galore_scale galore_target galore_update_interval "
    "generation_config generation_max_length generation_num_beams gradient_accumulation_steps "
    "gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hf_hub_token hub_always_push "
    "hub_model_id hub_private_repo hub_revision hub_strategy hub_token hyper_parallel_args ignore_data_skip "
    "ignore_pad_token_for_loss image_do_pan_and_scan image_max_pixels image_min_pixels "
    "include_effective_tokens_per_second include_for_metrics include_num_input_tokens_seen infer_backend "
    "infer_dtype init_special_tokens interleave_probs kt_expert_checkpoint_path kt_lora_expert_intermediate_size "
    "kt_lora_expert_num kt_use_lora_experts kt_weight_path kto_chosen_weight kto_rejected_weight label_names "
    "label_smoothing_factor ld_alpha learning_rate length_column_name length_penalty liger_kernel_config "
    "load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_dir "
    "logging_first_step logging_nan_inf_filter logging_steps logging_strategy lora_alpha lora_dropout lora_rank "
    "lora_target loraplus_lr_embedding loraplus_lr_ratio low_cpu_mem_usage lr_scheduler_kwargs lr_scheduler_type "
    "mask_history master_addr master_port max_grad_norm max_length max_new_tokens max_samples max_steps "
    "media_dir metric_for_best_model mix_strategy mixture_of_depths model_name_or_path model_revision "
    "module_dropout moe_aux_loss_coef ms_hub_token neat_packing neftune_noise_alpha new_special_tokens_config "
    "num_beams num_train_epochs offload_folder oft_block_size oft_rank oft_target om_hub_token optim optim_args "
    "optim_target_modules output_dir overwrite_cache overwrite_output_dir packing parallelism_config "
    "per_device_eval_batch_size per_device_train_batch_size pissa_convert pissa_init pissa_iter plot_loss "
    "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards predict_with_generate "
    "prediction_loss_only pref_bco_weight pref_beta pref_ftx pref_loss preprocessing_batch_size "
    "preprocessing_num_workers preserve_thinking print_param_status profile_modules profiler_active_steps "
    "profiler_output_dir profiler_profile_memory profiler_record_shapes profiler_repeat profiler_wait_steps "
    "profiler_warmup_steps profiler_with_stack project pure_bf16 push_to_hub quantization_bit "
    "quantization_device_map quantization_method quantization_type ray_init_kwargs ray_num_workers ref_model "
    "ref_model_adapters ref_model_quantization_bit remove_unused_columns repetition_penalty report_to "
    "resize_vocab restore_callback_states_from_checkpoint resume_from_checkpoint reward_model "
    "reward_model_adapters reward_model_quantization_bit reward_model_type rope_scaling run_name "
    "save_on_each_node save_only_model save_steps save_strategy save_total_limit seed sglang_config "
    "sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size shift_attn simpo_gamma "
    "skip_memory_metrics skip_special_tokens sortish_sampler split_special_tokens stage streaming "
    "swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir swanlab_mode swanlab_project "
    "swanlab_run_name swanlab_workspace temperature template tf32 tokenized_path tool_format top_k top_p "
    "torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id "
    "trackio_space_id trackio_static_space_id train_from_scratch train_on_prompt train_sampling_strategy "
    "trust_remote_code upcast_layernorm upcast_lmhead_output use_adam_mini use_apollo use_asft_loss "
    "use_audio_in_video use_badam use_cache use_cpu use_dft_loss use_dora use_eaft_loss use_fast_tokenizer "
    "use_galore use_hyper_parallel use_kt use_kv_cache use_liger_kernel use_llama_pro use_mca use_muon "
    "use_reentrant_gc use_rslora use_swanlab use_unsloth use_unsloth_gc use_v1_kernels val_size video_fps "
    "video_max_pixels video_maxlen video_min_pixels vllm_config vllm_enforce_eager vllm_gpu_util "
    "vllm_max_lora_rank vllm_maxlen warmup_ratio warmup_steps weight_decay "
)
# Of transformers 4, which older releases of LLaMA-Factory use.
OLDER = _names(
    "adafactor dispatch_batches evaluation_strategy fp16_backend fp16_opt_level fsdp_min_num_params "
    "fsdp_transformer_layer_cls_to_wrap group_by_length half_precision_backend include_inputs_for_metrics "
    "include_tokens_per_second jit_mode_eval mp_parameters no_cuda past_index per_gpu_eval_batch_size "
    "per_gpu_train_batch_size push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope "
    "save_safetensors sharded_ddp split_batches torchdynamo tpu_metrics_debug tpu_num_cores use_ipex "
    "use_mps_device "
)
_CLOSE = 0.85  # a ratio: one letter wrong or two swapped, in a key of seven letters or more


def misspelled(key: str) -> str | None:
    """The known key that an unknown one was meant to be; None for a known key, and for one that is like none."""
    known = KEYS | OLDER
    if key in known:
        return None
    bare = key.lower().replace("-", "_")
    close = [bare] if bare in known else difflib.get_close_matches(bare, known, n=1, cutoff=_CLOSE)
    return close[0] if close else None


def is_known(key: str) -> bool:
    """Whether LLaMA-Factory has a key, in this release or an older one."""
    return key in KEYS or key in OLDER
