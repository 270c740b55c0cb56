# https://github.com/VSehwag/minimal-diffusion at ea0321eba1
# rankcheck --empty --launcher torchrun /CLONE/main.py --arch UNetSmall --dataset cifar10 --class-cond --epochs 3 --batch-size 16 --diffusion-steps 20 --sampling-steps 2
# It takes its rank from torchrun's LOCAL_RANK, and the folder that it saves to is made
cd /CLONE
ed -s main.py <<'END'
438c
        num_workers=1,
.
361c
    os.makedirs(args.save_dir, exist_ok=True)
    if args.local_rank == 0:
.
350c
    parser.add_argument("--local_rank", default=os.environ["LOCAL_RANK"], type=int)
.
w
END
ed -s unets.py <<'END'
899c
        num_res_blocks=1,
.
890c
        attention_resolutions = "8"
.
880c
        channel_mult = (1, 1)
.
w
END
cat > cv2.py <<'END'
def imwrite(name, image):
    pass
END
cat > easydict.py <<'END'
class EasyDict(dict):
    __getattr__ = dict.__getitem__
END
