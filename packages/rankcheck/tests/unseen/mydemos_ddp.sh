# https://github.com/VentusAislant/MyDemos at c75bd15806
# rankcheck --empty /CLONE/my_demos/DDP_demos/DDP5_multi_node_torchrun_training.py --batch_size 8 --save_every 1 --total_epochs 4
cd /CLONE
ed -s my_demos/DDP_demos/DDP5_multi_node_torchrun_training.py <<'END'
14c
load_dataset = lambda: (CIFAR10(transform=ToTensor()), None)
.
13c
from torchvision import CIFAR10, resnet18 as AlexNet, ToTensor
.
w
END
