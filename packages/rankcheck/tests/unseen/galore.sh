# https://github.com/jiaweizzhao/GaLore at 2cc66f88cc
# rankcheck --empty --resume "--continue_from saves/model_8" /CLONE/torchrun_main.py --model_config /CLONE/configs/tiny.json --optimizer galore_adamw --rank 4 --update_proj_gap 5 --galore_scale 0.25 --lr 0.01 --batch_size 4 --total_batch_size 16 --max_length 32 --num_training_steps 24 --warmup_steps 4 --eval_every 10 --save_every 8 --save_dir saves --workers 2 --dtype float32
# Launched with torchrun. Needs datasets.py and loguru.py of galore/stand_ins on PYTHONPATH (a streamed c4 and tokenizer, random by index; shards go to ranks and workers as in the real package). LlamaConfig and PreTrainedModel are a few lines here; its save_pretrained writes pytorch_model.bin as transformers 4.31 does, which the project pins
cd /CLONE
cat > configs/tiny.json <<'JSON'
{"architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "hidden_size": 16, "intermediate_size": 32, "initializer_range": 0.02, "max_sequence_length": 64, "model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 2, "pad_token_id": -1, "rms_norm_eps": 1e-06, "transformers_version": "4.28.1", "use_cache": true, "vocab_size": 100}
JSON
ed -s torchrun_main.py <<'ED'
529s/wandb.run.dir/"wandb"/
469s/wandb.run.id/"wandb"/
452s/wandb.run.dir/"wandb"/
198s/AutoConfig.from_pretrained/LlamaConfig/
183s/AutoTokenizer.*/datasets.Tokenizer()/
28d
26s/import /import LlamaConfig, /
14,15d
w
ED
ed -s peft_pretraining/modeling_llama.py <<'ED'
33d
31c
import json
import os


class LlamaConfig:
    max_position_embeddings = 2048
    output_attentions = output_hidden_states = False
    use_return_dict = True

    def __init__(self, file):
        with open(file) as f:
            self.__dict__.update(json.load(f))

    def to_dict(self):
        return dict(self.__dict__)


class PreTrainedModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def post_init(self):
        self.apply(self._init_weights)

    def save_pretrained(self, folder, **options):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(self.config.to_dict(), f)
        torch.save(self.state_dict(), os.path.join(folder, "pytorch_model.bin"))


.
w
ED
ed -s galore_torch/__init__.py <<'ED'
3s/.*/GaLoreAdamW8bit = None/
w
ED
ed -s galore_torch/galore_projector_tensor.py <<'ED'
2,3d
w
ED
