// LAMB in two passes, because its step needs norms of the whole parameter. Included after steps.h and
// reduce.h.

// Updates the moments and sums the squares of the parameter and of the direction; master is only read.
template <Dtype G, Master M>
LambSums lamb_moments_range(const StepArgs& args, std::size_t begin, std::size_t end) {
    const Lamb rule(args.constants);
    std::conditional_t<kSplits<M>, Input<std::uint16_t>, Absent<const std::uint16_t>> param;
    if constexpr (kSplits<M>) {
        param.base = args.param;
    }
    const Input<MasterStorage<M>> master{static_cast<const MasterStorage<M>*>(args.master)};
    LambSums total{0.0, 0.0};
    for (std::size_t i = begin; i < end; i += kSumBlock) {
        SquareLanes params, directions;
        for_groups<kGroup>(
            i, end - i < kSumBlock ? end : i + kSumBlock,
            [&](std::size_t, const Storage<G>* __restrict grad, const std::uint16_t* __restrict h,
                const MasterStorage<M>* __restrict w, float* __restrict exp_avg,
                float* __restrict exp_avg_sq) {
                for (std::size_t k = 0; k < kGroup; k += kPair) {
                    Vec::F p[2];
                    load_master<M>(advance<kSplits<M>>(h, k), w + k, p);
                    for (std::size_t j = 0; j < 2; ++j) {
                        const std::size_t at = k + j * Vec::kWidth;
                        Vec::F m = Vec::load(exp_avg + at), v = Vec::load(exp_avg_sq + at);
                        rule.moments(rule.gradient(load_as<G>(grad + at), p[j]), m, v);
                        m = Vec::canonical_nan(m);
                        v = Vec::canonical_nan(v);
                        Vec::store(exp_avg + at, m);
                        Vec::store(exp_avg_sq + at, v);
                        params.add(at, p[j]);
                        directions.add(at, rule.direction(p[j], m, v));  // 0 / eps where the group is padded
                    }
                }
            },
            Input<Storage<G>>{static_cast<const Storage<G>*>(args.grad)}, param, master,
            InOut<float>{static_cast<float*>(args.states[0])},
            InOut<float>{static_cast<float*>(args.states[1])});
        total.param += params.total();
        total.direction += directions.total();
    }
    return total;
}

// Moves the parameter along the direction, of which neg_step is the factor.
template <Master M>
void lamb_apply_range(const StepArgs& args, std::size_t begin, std::size_t end) {
    using Emission = Storage<kEmitDtype<M>>;
    const Lamb rule(args.constants);
    const Vec::F neg_step = Vec::set(args.neg_step);
    std::conditional_t<kSplits<M>, InOut<std::uint16_t>, Absent<std::uint16_t>> param;
    std::conditional_t<kEmits<M>, Output<Emission>, Absent<Emission>> emit;
    if constexpr (kSplits<M>) {
        param.base = args.param;
    }
    if constexpr (kEmits<M>) {
        emit.base = static_cast<Emission*>(args.emit);
    }
    for_groups<kGroup>(
        begin, end,
        [&](std::size_t, std::uint16_t* __restrict h, MasterStorage<M>* __restrict w,
            const float* __restrict exp_avg, const float* __restrict exp_avg_sq, Emission* __restrict out) {
            for (std::size_t k = 0; k < kGroup; k += kPair) {
                Vec::F p[2], updated[2];
                load_master<M>(advance<kSplits<M>>(h, k), w + k, p);
                for (std::size_t j = 0; j < 2; ++j) {
                    const std::size_t at = k + j * Vec::kWidth;
                    const Vec::F u =
                        rule.direction(p[j], Vec::load(exp_avg + at), Vec::load(exp_avg_sq + at));
                    updated[j] = Vec::canonical_nan(Vec::fma(neg_step, u, p[j]));
                }
                store_master<M, false>(advance<kSplits<M>>(h, k), w + k, advance<kEmits<M>>(out, k), updated);
            }
        },
        param, InOut<MasterStorage<M>>{static_cast<MasterStorage<M>*>(args.master)},
        Input<float>{static_cast<const float*>(args.states[0])},
        Input<float>{static_cast<const float*>(args.states[1])}, emit);
}
