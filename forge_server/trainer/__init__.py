"""The trainer: veRL's actor worker fed over HTTP. Runs only in veRL's environment, alone of this package.

Programs, each as ``python -m forge_server.trainer.NAME``:

- worker: the long-lived job: pull batch k, update, checkpoint k, report
- sft: veRL's SFT trainer on pre-tokenised rows
- config: veRL's Hydra config with the user's overrides; refuses what would be ignored or wrong
- manifest: what a checkpoint folder holds; makes and verifies

Parts: batch, layout, advantage and update go from rows to one optimiser step of veRL; checkpoint, link and
platform are the disk, the wire and the device.
"""
