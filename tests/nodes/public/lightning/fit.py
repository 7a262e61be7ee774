"""A user's script for Lightning: a small network learns a sine."""

import argparse
import math

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Sine(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


parser = argparse.ArgumentParser()
parser.add_argument("--max_epochs", type=int, default=10)
parser.add_argument("--num_nodes", type=int, default=1)
parser.add_argument("--default_root_dir", default="lightning_out")
parser.add_argument("--ckpt_path", help="a checkpoint to continue from")
args = parser.parse_args()
lightning.seed_everything(7)
x = torch.linspace(-math.pi, math.pi, 160).unsqueeze(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sin()), batch_size=8, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, num_nodes=args.num_nodes, max_epochs=args.max_epochs, log_every_n_steps=1,
    default_root_dir=args.default_root_dir,
    callbacks=[ModelCheckpoint(dirpath=f"{args.default_root_dir}/checkpoints", every_n_epochs=5, save_top_k=-1)],
)  # fmt: skip
trainer.fit(Sine(), loader, ckpt_path=args.ckpt_path)
