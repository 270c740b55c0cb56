# https://github.com/lmnt-com/diffwave at 0594106093
# rankcheck --empty /CLONE/src/diffwave/__main__.py models waves --max_steps 30
# A restart finds models/weights.pt by itself. The waves and their spectrograms are random
cd /CLONE/src/diffwave
ed -s __main__.py <<'END'
15c

import os, sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
.
w
END
ed -s dataset.py <<'END'
150c
      num_workers=0,
.
40,41c
    random_state = np.random.RandomState(int(audio_filename))
    signal = torch.from_numpy(random_state.rand(1, 2048).astype('float32'))
    spectrogram = random_state.rand(8, 8).astype('float32')
.
32c
      self.filenames += [str(i) for i in range(64)]
.
21d
w
END
ed -s params.py <<'END'
50c
    residual_channels=8,
.
49c
    residual_layers=2,
.
46c
    crop_mel_frames=4,
.
43c
    n_mels=8,
.
37c
    batch_size=8,
.
w
END
