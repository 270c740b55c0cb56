# https://github.com/jik876/hifi-gan at 4769534d45
# rankcheck --empty /CLONE/train.py --config /CLONE/config_v3.json --input_wavs_dir /DATA/wavs --input_training_file /DATA/train.txt --input_validation_file /DATA/val.txt --training_epochs 4 --stdout_interval 1 --checkpoint_interval 5 --validation_interval 10 --summary_interval 5
# DATA: wavs: 64 files, 00.wav to 63.wav, of 4096 random int16 at 22050 Hz; train.txt has the lines 00 to 59, val.txt 60 to 63
cd /CLONE
ed -s train.py <<'END'
208,211c




.
207c
                                y_hat_spec = 0
.
206c

.
204c

.
203c
                                    pass
.
19c
from utils import scan_checkpoint, load_checkpoint, save_checkpoint
.
w
END
ed -s meldataset.py <<'END'
67c
    spec = torch.sqrt(spec.abs().pow(2)+(1e-9))
.
65c
                      center=center, pad_mode='reflect', normalized=False, onesided=True, return_complex=True)
.
9c
def librosa_mel_fn(sampling_rate, n_fft, num_mels, fmin, fmax): return np.random.RandomState(0).rand(num_mels, n_fft // 2 + 1)
.
7c
def normalize(audio): return audio / abs(audio).max()
.
w
END
ed -s utils.py <<'END'
7c

.
6c

.
3c

.
w
END
ed -s models.py <<'END'
204c
        self.conv_post = norm_f(Conv1d(8, 1, 3, 1, padding=1))
.
197,202d
196c
            norm_f(Conv1d(1, 8, 15, 1, padding=7)),
.
140c
        self.conv_post = norm_f(Conv2d(8, 1, (3, 1), 1, padding=(1, 0)))
.
136,138d
135c
            norm_f(Conv2d(32, 8, (kernel_size, 1), (stride, 1), padding=(get_padding(5, 1), 0))),
.
w
END
ed -s config_v3.json <<'END'
30c
    "num_workers": 1,
.
17c
    "segment_size": 2048,
.
13c
    "upsample_initial_channel": 16,
.
4c
    "batch_size": 12,
.
w
END
