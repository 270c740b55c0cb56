# https://github.com/thuml/OpenLTM at 0b3005099d
# rankcheck --empty /CLONE/run.py --ddp --task_name forecast --is_training 1 --model_id few --model timer_xl --data UnivariateDatasetBenchmark --data_path random.csv --seq_len 32 --input_token_len 8 --output_token_len 8 --test_seq_len 32 --test_pred_len 8 --e_layers 1 --d_model 16 --d_ff 32 --n_heads 2 --batch_size 16 --learning_rate 0.0005 --train_epochs 6 --num_workers 1 --cosine --tmax 10 --use_norm --valid_last
# It starts from nothing each time. One random series of 300 points in place of a csv; pandas, matplotlib and einops are patched away, so are the models other than timer_xl
cd /CLONE
ed -s data_provider/data_loader.py <<'END'
73,76c
        data = df_raw
.
36c
            df_raw = np.random.RandomState(0).randn(300, 1).cumsum(0)
.
3d
w
END
ed -s exp/exp_basic.py <<'END'
10,15d
8d
1c
from models import timer_xl
.
w
END
ed -s utils/tools.py <<'END'
6d
3,4d
w
END
ed -s layers/Attn_Bias.py <<'END'
/weight = rearrange(/,/"two num_heads/c
        weight = self.emb.weight[:, :, None, None]
.
/^from einops/d
w
END
ed -s layers/Attn_Projection.py <<'END'
/return rearrange/c
        return torch.stack([-x2, x1], -1).flatten(-2)
.
/x1, x2 = rearrange/c
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
.
/m_theta = repeat/c
            m_theta = m_theta.repeat_interleave(2, -1)
.
/m_theta = einsum/,/length width/c
            m_theta = position[:, None] * self.theta[None]
.
/^from einops/d
w
END
ed -s layers/SelfAttention_Family.py <<'END'
72,74c
        var_id = torch.arange(n_vars).repeat_interleave(n_tokens)
        var_id = var_id.expand(B, 1, -1).to(queries.device)
.
65c
        seq_id = seq_id.expand(B, H, -1)
.
5d
w
END
