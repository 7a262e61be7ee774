@echo off
rem Starts the training of GPT-2 XL with DeepSpeed.
set NUM_GPUS=4
set CONFIG=ds_config_zero2.json
if not exist data\shakespeare\train.bin (
    echo no data: python data\shakespeare\prepare.py
    exit /b 1
)
deepspeed --num_gpus=%NUM_GPUS% train_deepspeed.py --deepspeed_config %CONFIG% %*
