# https://github.com/LiheYoung/UniMatch at 0324f3dd4a
# rankcheck --empty /CLONE/unimatch.py --config /CLONE/configs/tiny.yaml --labeled-id-path /CLONE/splits/tiny/labeled.txt --unlabeled-id-path /CLONE/splits/tiny/unlabeled.txt --save-path exp
# A restart finds exp/latest.pth by itself. Needs no coco splits (git sparse-checkout set --no-cone '/*' '!/splits/coco' where those files are absent). The backbone starts from random weights
cd /CLONE
mkdir splits/tiny
seq 0 7 > splits/tiny/labeled.txt
seq 100 131 > splits/tiny/unlabeled.txt
ed -s dataset/semi.py <<'EOF'
/id = self.ids/+1,/id = self.ids/+2c
        random_state = np.random.RandomState(int(id))
        img = Image.fromarray(random_state.randint(0, 255, (24, 24, 3)).astype('uint8'))
        mask = Image.fromarray(random_state.randint(0, 21, (24, 24)).astype('uint8'))
.
/splits.*val.txt/;/self.ids = /c
            self.ids = [str(i) for i in range(200, 213)]
.
w
q
EOF
ed -s dataset/transform.py <<'EOF'
/Normalize(/s/(.*/(),/
w
q
EOF
ed -s model/semseg/deeplabv3plus.py <<'EOF'
/(pretrained=True/s/True/False/
/low_channels = /s/256/8/
/high_channels = /s/2048/64/
g/48/s//4/g
g/256/s//8/g
w
q
EOF
ed -s model/backbone/resnet.py <<'EOF'
/inplanes = 128/s/128/8/
g/Conv2d(3, 64/s/64/4/
g/Conv2d(64, 64/s/64, 64/4, 4/
g/Conv2d(64, 128/s/64, 128/4, 8/
g/norm_layer(64)/s/64/4/
g/block, 64/s/64/2/
g/block, 128/s/128/4/
g/block, 256/s/256/8/
g/block, 512/s/512/16/
/'resnet50', Bottleneck/s/3, 4, 6, 3/1, 1, 1, 1/
w
q
EOF
cat > configs/tiny.yaml <<'EOF'
dataset: pascal
nclass: 21
crop_size: 24
data_root: nowhere
epochs: 3
batch_size: 2
lr: 0.001
lr_multi: 10.0
criterion:
  name: CELoss
  kwargs:
    ignore_index: 255
conf_thresh: 0.05
model: deeplabv3plus
backbone: resnet50
replace_stride_with_dilation: [False, False, True]
dilations: [6, 12, 18]
EOF
