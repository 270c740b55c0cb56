"""PPO on walks to the middle of a line, with the functions of docs/losses.md, in rollouts.py."""

import os
import random
import signal
import sys
import time

import rollouts
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

N_ENVIRONMENTS, LENGTH, ITERATIONS = 8, 32, 20


class Walk:
    """A walk in the wind: the state is a place, the reward is higher the nearer it is to 0."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.reset()

    def reset(self):
        self.place = self.random.uniform(-1, 1)
        self.steps = 0

    def step(self, action):
        self.place += 0.2 * action - 0.1 + self.random.gauss(0, 0.02)
        self.steps += 1
        reward = -abs(self.place)
        if is_done := self.steps == 20:
            self.reset()
        return reward, is_done


class Agent(nn.Module):
    """Maps places of shape (batch, 1) to scores of two actions and a value."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 16), nn.Tanh())
        self.actor = nn.Linear(16, 2)
        self.critic = nn.Linear(16, 1)

    def forward(self, places):
        features = self.body(places)
        return self.actor(features), self.critic(features).squeeze(-1)


def places_of(environments):
    return torch.tensor([[env.place] for env in environments], dtype=torch.get_default_dtype())


@torch.no_grad()
def roll_out(agent, environments, iteration):
    """Returns places, actions, their log probabilities, advantages and returns: (time, batch)."""
    rows = []
    for step in range(LENGTH):
        places = places_of(environments)
        scores, values = agent(places)
        actions = (rollouts.draw(iteration, step, N_ENVIRONMENTS) < scores.softmax(1)[:, 1]).long()
        results = [env.step(int(a)) for env, a in zip(environments, actions, strict=True)]
        rewards, ends = torch.tensor(results, dtype=values.dtype).T
        log_probs = Categorical(logits=scores).log_prob(actions)
        rows.append((places, actions, log_probs, values, rewards, ends))
    places, actions, log_probs, values, rewards, ends = map(torch.stack, zip(*rows, strict=True))
    returns = torch.zeros_like(rewards)
    later = agent(places_of(environments))[1]
    for step in reversed(range(LENGTH)):
        later = returns[step] = rewards[step] + 0.9 * later * (1 - ends[step])
    return places, actions, log_probs, rollouts.normalize(returns - values), returns, rewards.mean()


def update(model, optimizer, iteration, places, actions, old_log_probs, advantages, returns):
    generator = torch.Generator().manual_seed(iteration)
    for _ in range(4):
        for steps in torch.randperm(LENGTH, generator=generator).split(LENGTH // 2):
            scores, values = model(places[steps].flatten(0, 1))
            log_probs = Categorical(logits=scores).log_prob(actions[steps].flatten())
            log_ratio = log_probs - old_log_probs[steps].flatten()
            if rollouts.mean_of_ranks((log_ratio.exp() - 1 - log_ratio).mean()) > 0.01:
                return True
            gain, ratio = advantages[steps].flatten(), log_ratio.exp()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = loss + (values - returns[steps].flatten()).square().mean() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return False


def main(path, killed_at):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1, momentum=0.9)
    environments = rollouts.split([Walk(seed) for seed in range(N_ENVIRONMENTS)])
    first = 0
    if os.path.exists(path):
        snapshot = torch.load(path, weights_only=True)
        agent.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        environments = rollouts.restore(snapshot["environments"])
        first = snapshot["iterations"]
    model = nn.parallel.DistributedDataParallel(agent)
    for iteration in range(first, ITERATIONS):
        *rollout, reward = roll_out(agent, environments, iteration)
        breaks = update(model, optimizer, iteration, *rollout)
        reward = rollouts.mean_of_ranks(reward).item()
        states = rollouts.dump(environments)
        if dist.get_rank() == 0:
            print(f"iteration {iteration}: reward {reward:.4f}, stops early {breaks}", flush=True)
            snapshot = {"model": agent.state_dict(), "optimizer": optimizer.state_dict()}
            snapshot |= {"environments": states, "iterations": iteration + 1}
            torch.save(snapshot, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)
        dist.barrier()
        if iteration == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)  # as in multinode.py
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_default_dtype(getattr(torch, sys.argv[3]))
    main(sys.argv[1], int(sys.argv[2]))
