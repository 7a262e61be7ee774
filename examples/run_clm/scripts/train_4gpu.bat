@echo off
rem Usage: scripts\train_4gpu.bat MODEL
set MODEL=%1
set CUDA_VISIBLE_DEVICES=0,1,2,3
set MASTER_ADDR=localhost
deepspeed --num_gpus=4 --module training.run_clm ^
  --model_name_or_path %MODEL% --dataset_name wikitext ^
  --per_device_train_batch_size 2 --gradient_accumulation_steps 8 ^
  --deepspeed ds_config.json --output_dir .\output
