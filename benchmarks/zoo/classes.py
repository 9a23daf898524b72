"""Real classes of other packages, tiny and with random weights, and some oddities of our own: a step for each.

A package is imported when a model of it is made, so that those which are not installed are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[nn.Module], Tensor]
Make = Callable[[], tuple[nn.Module, Step]]

VOCABULARY, LENGTH = 512, 48
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 72, "pad_token_id": 0, **SIZES}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


# ------------------------------------------------------------------------------------------------ transformers


def of_text(kind: str, model: str, *, length: int = LENGTH, **config: object) -> Make:
    def make() -> tuple[nn.Module, Step]:
        package = importlib.import_module("transformers")
        torch.manual_seed(0)
        own = getattr(package, f"{kind}Config")(**config)
        tokens_bt = tokens(2, length)
        found = getattr(package, f"{kind}For{model}")(own).train()
        return found, lambda model: model(input_ids=tokens_bt, labels=tokens_bt).loss

    return make


def of_pictures(kind: str, **config: object) -> Make:
    def make() -> tuple[nn.Module, Step]:
        package = importlib.import_module("transformers")
        torch.manual_seed(0)
        found = getattr(package, f"{kind}ForImageClassification")(getattr(package, f"{kind}Config")(**config)).train()
        pictures, labels = torch.randn(2, 3, 64, 64), torch.randint(2, (2,))
        return found, lambda model: F.cross_entropy(model(pixel_values=pictures).logits, labels)

    return make


def gpt2() -> tuple[nn.Module, Step]:
    package = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = package.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_layer=4, n_embd=64, n_head=4, **TOKENS)
    tokens_bt = tokens(2, LENGTH)
    return package.GPT2LMHeadModel(config).train(), lambda model: model(input_ids=tokens_bt, labels=tokens_bt).loss


def clip() -> tuple[nn.Module, Step]:
    package = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 3}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **TOKENS, **sizes}
    vision = {"image_size": 32, "patch_size": 8, **sizes}
    tokens_bt, pictures = tokens(3, 16), torch.randn(3, 3, 32, 32)
    model = package.CLIPModel(package.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)).train()
    return model, lambda model: model(input_ids=tokens_bt, pixel_values=pictures, return_loss=True).loss


def lora() -> tuple[nn.Module, Step]:
    package = importlib.import_module("peft")
    model, step = CAUSAL["Llama"]()
    config = package.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return package.get_peft_model(model, config), step


HEADS = {"num_key_value_heads": 2, "use_cache": False, **TOKENS}
EXPERTS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
CAUSAL: dict[str, Make] = {
    kind: of_text(kind, "CausalLM", **TEXT, **HEADS, **EXPERTS.get(kind, {}))
    for kind in (
        *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "StableLm", "Olmo2", "Granite"),
        *("Cohere", "Starcoder2", "GPTNeoX", *EXPERTS),
    )
}
MASKED: dict[str, Make] = {
    kind: of_text(kind, "MaskedLM", **TEXT) for kind in ("Bert", "Roberta", "Albert", "ModernBert", "RoFormer")
}
SMALL = {"vocab_size": VOCABULARY, "d_model": 64}
OTHERS: dict[str, Make] = {
    "GPT2": gpt2,
    "Mamba": of_text(
        *("Mamba", "CausalLM"),
        length=12,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        state_size=4,
        **{"use_cache": False, **TOKENS},
    ),
    "T5": of_text(
        *("T5", "ConditionalGeneration"),
        **{**SMALL, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "ViT": of_pictures("ViT", image_size=64, patch_size=8, **SIZES),
    "Swin": of_pictures("Swin", patch_size=4, embed_dim=32, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=4),
    "Segformer": of_pictures("Segformer", hidden_sizes=[16, 32, 32, 64]),
    "CLIP": clip,
    "Llama with LoRA of PEFT": lora,
}


# ---------------------------------------------------------------------------------- timm, torchvision, PyG, diffusers


def of_timm(name: str, size: int = 64) -> Make:
    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model = importlib.import_module("timm").create_model(name, pretrained=False, num_classes=10).train()
        pictures, labels = torch.randn(2, 3, size, size), torch.randint(10, (2,))
        return model, lambda model: F.cross_entropy(model(pictures), labels)

    return make


def of_torchvision(name: str) -> Make:
    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model = getattr(importlib.import_module("torchvision.models"), name)(num_classes=10).train()
        pictures, labels = torch.randn(2, 3, 64, 64), torch.randint(10, (2,))
        return model, lambda model: F.cross_entropy(model(pictures), labels)

    return make


def of_graphs(name: str) -> Make:
    def make() -> tuple[nn.Module, Step]:
        package = importlib.import_module("torch_geometric.nn")
        torch.manual_seed(0)
        rows, edges, labels = torch.randn(400, 32), torch.randint(400, (2, 3000)), torch.randint(10, (400,))
        return getattr(package, name)(32, 64, 4, 10).train(), lambda model: F.cross_entropy(model(rows, edges), labels)

    return make


def of_diffusion(name: str, call: Callable[[nn.Module, Tensor], object], **config: object) -> Make:
    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model = getattr(importlib.import_module("diffusers"), name)(**config).train()
        noise = torch.randn(2, model.config.in_channels, 16, 16)
        return model, lambda model: call(model, noise).sample.square().mean()

    return make


TIMES = torch.tensor([3, 7])
STATES = torch.arange(2 * 8 * 32).view(2, 8, 32).sin()
CHANNELS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
DIFFUSION: dict[str, Make] = {
    "UNet2DModel": of_diffusion(
        *("UNet2DModel", lambda model, noise: model(noise, TIMES)),
        sample_size=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        **{"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), **CHANNELS},
    ),
    "UNet2DConditionModel": of_diffusion(
        *("UNet2DConditionModel", lambda model, noise: model(noise, TIMES, STATES)),
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **CHANNELS,
    ),
    "AutoencoderKL": of_diffusion(
        *("AutoencoderKL", lambda model, noise: model(noise)),
        **{"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, **CHANNELS},
    ),
    "VQModel": of_diffusion(
        *("VQModel", lambda model, noise: model(noise)),
        block_out_channels=(32,),
        num_vq_embeddings=16,
        norm_num_groups=8,
    ),
    "DiTTransformer2DModel": of_diffusion(
        *("DiTTransformer2DModel", lambda model, noise: model(noise, timestep=TIMES, class_labels=TIMES)),
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=4,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        norm_num_groups=4,
    ),
    "SD3Transformer2DModel": of_diffusion(
        "SD3Transformer2DModel",
        lambda model, noise: model(
            noise, encoder_hidden_states=STATES, pooled_projections=STATES[:, 0], timestep=TIMES
        ),
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
    ),
}
TIMM = (
    *("efficientnet_b0", "mobilenetv3_small_100", "resnet18", "resnet50", "convnext_atto", "regnetx_002"),
    *("mobilevit_xxs", "xception41", "repvgg_a0", "ghostnet_050", "poolformer_s12", "res2net50_14w_8s", "dla34"),
    *("edgenext_xx_small", "skresnet18"),
)
TORCHVISION = ("mobilenet_v2", "densenet121", "shufflenet_v2_x0_5", "squeezenet1_1", "regnet_y_400mf", "swin_t")


# ----------------------------------------------------------------------------------------------- oddities of our own


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd + self.down(F.gelu(self.up(self.norm(x_btd))))


class Language(nn.Module):
    """A language model whose own code computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, 64), nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = self.embed(tokens_bt)
        for block in self.blocks:
            x_btd = block(x_btd)
        return F.cross_entropy(self.head(x_btd).flatten(0, 1), tokens_bt.flatten())


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args)


class Towers(nn.Module):
    """Four towers, whose blocks lie in two wrappers each."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Around(Around(nn.Sequential(*(Block() for _ in range(4))))) for _ in range(4))

    def forward(self, x_btd: Tensor) -> Tensor:
        return torch.cat([tower(x_btd) for tower in self.towers], -1)


class Shared(nn.Module):
    """A block that is called between others, and inside of two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.others = nn.ModuleList([Around(self.block), Block(), Around(self.block)])

    def forward(self, x_btd: Tensor) -> Tensor:
        for other in self.others:
            x_btd = other(self.block(x_btd))
        return x_btd


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell, self.head = nn.LSTM(64, 64, batch_first=True), nn.GRUCell(64, 64), nn.Linear(64, 8)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd, _ = self.lstm(x_btd)
        state_bd = x_btd[:, 0]
        for x_bd in x_btd.unbind(1)[:8]:
            state_bd = self.cell(x_bd, state_bd)
        return self.head(state_bd)


def language(wrappers: int) -> Make:
    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model, tokens_bt = Language(), tokens(4, 64)
        for _ in range(wrappers):
            model = Around(model)
        return model, lambda model: model(tokens_bt)

    return make


def on_rows(kind: Callable[[], nn.Module]) -> Make:
    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model, x_btd = kind(), torch.randn(4, 64, 64)
        return model, lambda model: model(x_btd).square().mean()

    return make


OWN: dict[str, Make] = {
    "a loss inside of the model": language(0),
    "the same in three wrappers": language(3),
    "towers": on_rows(Towers),
    "a shared block": on_rows(Shared),
    "LSTM and GRU cell": on_rows(Recurrent),
    "one linear layer": on_rows(lambda: nn.Linear(64, 64)),
}
CLASSES: dict[str, dict[str, Make]] = {
    "own": OWN,
    "transformers": {**CAUSAL, **MASKED, **OTHERS},
    "timm": {name: of_timm(name) for name in TIMM},
    "torchvision": {name: of_torchvision(name) for name in TORCHVISION},
    "torch_geometric": {name: of_graphs(name) for name in ("GCN", "GAT", "GIN", "GraphSAGE", "EdgeCNN")},
    "diffusers": DIFFUSION,
}
