# https://github.com/awmthink/pytorch-in-action at 50889daad9
# rankcheck --empty /CLONE/trainer/image_classification_trainer.py --output_dir outputs --data_root none --seed 42 --learning_rate 0.1 --train_batch_size_per_device 4 --eval_batch_size_per_device 4 --grad_accumulation_batches 2 --num_train_epochs 5 --logging_steps 2 --eval_steps 5 --save_steps 4 --resume_from_checkpoint checkpoints
# The options are those of trainer/trainer_args.yml, smaller; a restart is the same command. stand_ins: simple_parsing, timm. The schedule falls every 2 epochs instead of every 30
cd /CLONE/trainer
ed -s image_classification_trainer.py <<'END'
597s/30/2/
137s/(.*)/()/
122,123c
        random_state = np.random.RandomState(index + 1000 * (self.split == "val"))
        image = Image.fromarray(random_state.randint(0, 255, (16, 16, 3)).astype("uint8"))
.
113,118c
        size = 96 if self.split == "train" else 32
        return [""] * size, [index % 10 for index in range(size)]
.
w
END
