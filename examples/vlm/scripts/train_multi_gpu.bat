@echo off
rem Usage: scripts\train_multi_gpu.bat CONFIG STAGE
set CONFIG=%1
set STAGE=%2
set MASTER_ADDR=localhost
set MASTER_PORT=29500
torchrun --nproc_per_node=4 --master_addr=%MASTER_ADDR% --master_port=%MASTER_PORT% ^
    train_vlm.py --config %CONFIG% --stage %STAGE%
