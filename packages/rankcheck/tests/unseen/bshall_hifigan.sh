# https://github.com/bshall/hifigan at 49c16c935c
# rankcheck --empty --resume '--resume out/model-best.pt' /CLONE/train.py /CLONE/data out
# It starts its ranks itself (mp.spawn); --resume wants the name of a file: model-best.pt is the one with a fixed name (from the first validation on), model-8.pt, model-16.pt ... lie beside it. torchaudio is a stand-in in the clone, its waves are random; matplotlib and its figures are patched away
cd /CLONE
mkdir -p torchaudio data/wavs/train data/wavs/dev
for i in $(seq 100 135); do touch data/wavs/train/$i.wav; done
for i in $(seq 200 203); do touch data/wavs/dev/$i.wav; done
cat > torchaudio/__init__.py <<'END'
from types import SimpleNamespace

import numpy as np
import torch


def info(path):
    return SimpleNamespace(sample_rate=16000, num_frames=1600)


def load(filepath, frame_offset=0, num_frames=-1):
    wave = np.random.RandomState(int(filepath.stem)).uniform(-1, 1, (1, 1600)).astype("float32")
    end = None if num_frames < 0 else frame_offset + num_frames
    return torch.from_numpy(wave[:, frame_offset:end].copy()), 16000
END
cat > torchaudio/transforms.py <<'END'
import torch


class MelSpectrogram(torch.nn.Module):
    def __init__(self, n_fft, hop_length, n_mels, **options):
        super().__init__()
        self.n_fft, self.hop_length = n_fft, hop_length
        self.register_buffer("window", torch.hann_window(n_fft))
        bands = (torch.arange(n_fft // 2 + 1) * n_mels) // (n_fft // 2 + 1)
        self.register_buffer("fb", torch.nn.functional.one_hot(bands, n_mels).float())

    def forward(self, wave):
        flat = wave.reshape(-1, wave.shape[-1])
        spectrum = torch.stft(flat, self.n_fft, self.hop_length, window=self.window, center=False, return_complex=True)
        mel = self.fb.T @ spectrum.abs()
        return mel.reshape(*wave.shape[:-1], *mel.shape[-2:])
END
ed -s train.py <<'END'
255,259d
125,130s/num_workers=8/num_workers=1/
100,110s/num_workers=8/num_workers=1/
43s/5000/16/
41s/1000/8/
39s/3100/4/
31s/8320/800/
30s/8/2/
w
END
ed -s hifigan/utils.py <<'END'
13,20c
    return None
.
2,5d
w
END
ed -s hifigan/generator.py <<'END'
26s/(10, 4, 2, 2)/(40, 4)/
25s/512/16/
24s/(20, 8, 4, 4)/(80, 8)/
23s/(3, 7, 11)/(3,)/
20,21d
w
END
sed -i -E -e '26,170s/\b(1024|512|256|128|32)\b/8/g' -e '140,149s/groups=(4|16)/groups=2/' -e '106,109d' -e '55,64d' -e '142,145d' -e '179d' hifigan/discriminator.py
