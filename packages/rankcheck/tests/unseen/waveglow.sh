# https://github.com/NVIDIA/waveglow at 8afb643df5
# rankcheck --empty --launcher python --resume='-c /CLONE/resume.json' /CLONE/distributed.py -c /CLONE/config.json
# resume.json names a checkpoint, which is all that distinguishes it from config.json. A stand-in takes the place of the submodule tacotron2; the waves are random
cd /CLONE
ed -s distributed.py <<'END'
146c
    args_list = [os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train.py')]
.
w
END
ed -s mel2samp.py <<'END'
56c
    sampling_rate, data = 22050, numpy.random.RandomState(int(full_path)).randint(-9999, 9999, 4096)
.
46,47c
    files = [str(i) for i in range(64)]
.
34c
import numpy
.
w
END
cat > config.json <<'END'
{
    "train_config": {
        "fp16_run": false,
        "output_directory": "checkpoints",
        "epochs": 3,
        "learning_rate": 1e-4,
        "sigma": 1.0,
        "iters_per_checkpoint": 5,
        "batch_size": 4,
        "seed": 1234,
        "checkpoint_path": "",
        "with_tensorboard": false
    },
    "data_config": {
        "training_files": "train_files.txt",
        "segment_length": 1024,
        "sampling_rate": 22050,
        "filter_length": 1024,
        "hop_length": 256,
        "win_length": 1024,
        "mel_fmin": 0.0,
        "mel_fmax": 8000.0
    },
    "dist_config": {
        "dist_backend": "nccl",
        "dist_url": "tcp://localhost:54321"
    },

    "waveglow_config": {
        "n_mel_channels": 8,
        "n_flows": 2,
        "n_group": 8,
        "n_early_every": 4,
        "n_early_size": 2,
        "WN_config": {
            "n_layers": 2,
            "n_channels": 8,
            "kernel_size": 3
        }
    }
}
END
sed 's/"checkpoint_path": ""/"checkpoint_path": "checkpoints\/waveglow_5"/' config.json > resume.json
cat > tacotron2/layers.py <<'END'
"""Stands in for NVIDIA/tacotron2: the lowest 8 frequencies of a spectrogram."""

import torch


class TacotronSTFT:
    def __init__(self, filter_length, hop_length, win_length, **options):
        self.sizes = filter_length, hop_length, win_length

    def mel_spectrogram(self, audio):
        window = torch.hann_window(self.sizes[2])
        spectrogram = torch.stft(audio, *self.sizes, window=window, return_complex=True)
        return spectrogram.abs()[:, :8].clamp(min=1e-5).log()
END
