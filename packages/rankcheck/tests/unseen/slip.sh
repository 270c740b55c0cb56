# https://github.com/facebookresearch/SLIP at c6faf5d03c
# rankcheck --empty /CLONE/main.py --model CLIP_VITB16 --output-dir out --epochs 4 --batch-size 8 --workers 1
# Its README starts it by torchrun; a restart finds out/checkpoint.pt by itself. timm and ftfy are patched away (a tiny image model in place of timm's), ten ImageNet classes instead of 1000. The model is CLIP as SLIP has SyncBatchNorm, which CPUs lack
cd /CLONE
ed -s models.py <<'END'
290,291c
    model = CLIP(embed_dim=16, vision_width=16, vision_model=vision_model, context_length=77, vocab_size=49408,
        transformer_width=16, transformer_heads=2, transformer_layers=1, **kwargs)
.
289c
    vision_model = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16))
.
257d
11d
w
END
ed -s tokenizer.py <<'END'
/text = ftfy.fix_text(text)/d
/^import ftfy/d
w
END
ed -s main.py <<'END'
361c
        labels = json.load(f)['imagenet'][:10]
.
w
END
ed -s datasets.py <<'END'
48,49c
            self.samples = [(i, f'a photo of number {i}', f'{i} things seen') for i in range(130)]
.
33,40c
    return Image.fromarray(np.random.RandomState(index).randint(0, 255, (32, 32, 3)).astype('uint8'))
.
w
END
