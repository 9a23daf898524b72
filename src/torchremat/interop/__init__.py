"""torchremat in the place of other libraries, and beside them.

torch_checkpoint    the names of `torch.utils.checkpoint`
installing.py       these put where third-party code has bound torch's
"""
