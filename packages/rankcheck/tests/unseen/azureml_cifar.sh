# https://github.com/Azure/azureml-examples at 085cd6ea39
# rankcheck --empty /CLONE/cli/jobs/single-step/pytorch/cifar-distributed/src/train.py --data-dir . --epochs 3 --batch-size 16 --workers 1 --print-freq 1
cd /CLONE
ed -s cli/jobs/single-step/pytorch/cifar-distributed/src/train.py <<'END'
136c
        [transforms.ToTensor(), transforms.Normalize()]
.
36c
        x = x.view(-1, 8 * 6 * 6)
.
27c
        self.fc1 = nn.Linear(8 * 6 * 6, 120)
.
26c
        self.conv3 = nn.Conv2d(16, 8, 3)
.
25c
        self.conv2 = nn.Conv2d(32, 16, 3)
.
9c
from unittest.mock import MagicMock; mlflow = MagicMock()
.
w
END
