"""Each rank plays in an environment of its own, and draws batches from its replay buffer."""

import random
from collections import deque

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
draw = random.Random(dist.get_rank())
torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
target = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)).requires_grad_(False)
target.load_state_dict(critic.state_dict())
model = nn.parallel.DistributedDataParallel(critic)
optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
buffer = deque(maxlen=500)
state = torch.zeros(3)
for step in range(60):
    with torch.no_grad():
        best = int(critic(state).argmax())
    action = draw.randrange(2) if draw.random() < 0.3 else best
    following = 0.9 * state + torch.tensor([draw.gauss(0, 1), action - 0.5, 1.0])
    buffer.append((state, action, float(-following.abs().sum()), following))
    state = following
    if step < 16 or step % 4:
        continue
    states, actions, rewards, followings = zip(*draw.sample(buffer, 16), strict=True)
    wanted = torch.tensor(rewards) + 0.9 * target(torch.stack(followings)).amax(1)
    values = model(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
    optimizer.zero_grad()
    nn.functional.smooth_l1_loss(values, wanted).backward()
    optimizer.step()
    if step % 20 == 0:
        target.load_state_dict(critic.state_dict())
dist.destroy_process_group()
