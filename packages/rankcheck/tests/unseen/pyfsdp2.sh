# https://github.com/fredstoolbox/pyFSDP2 at ea3f36e48a
# rankcheck --empty /CLONE/fsdp2_basic.py --batch-size 10
cd /CLONE
ed -s fsdp2_basic.py <<'END'
172c
    for epoch in range(4):
.
156c
    dataset = torch.utils.data.TensorDataset(*torch.rand(2, 120, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
.
122c
    model = DnCNN(num_layers=4, num_features=8)
.
w
END
