// The kernels, written once over Vec. Included by each kernels_<isa>.cpp after its Vec, inside an anonymous
// namespace: no function compiled for one instruction set can be linked into the path of another.
//
// Exact IEEE operations and explicit fma only. Read in this order.
#include "groups.h"
// loads and stores
#include "storage.h"
// then
#include "random.h"
// then
#include "states.h"
// then
#include "rules.h"
// then
#include "steps.h"
// and beside the step
#include "elementwise.h"
#include "recode.h"
#include "reduce.h"
// last
#include "lamb.h"

template <typename Rule, typename States, Mode kMode, Dtype G>
constexpr void fill_step(StepKernel (&row)[kMasters]) {
    row[static_cast<int>(Master::kSplit)] = step_range<Rule, States, kMode, G, Master::kSplit>;
    row[static_cast<int>(Master::kFloat32)] = step_range<Rule, States, kMode, G, Master::kFloat32>;
    row[static_cast<int>(Master::kEmitBfloat16)] = step_range<Rule, States, kMode, G, Master::kEmitBfloat16>;
    row[static_cast<int>(Master::kEmitFloat16)] = step_range<Rule, States, kMode, G, Master::kEmitFloat16>;
}

template <typename R, typename States, Dtype G>
constexpr void fill_modes(StepKernel (&modes)[kModes][kDtypes][kMasters]) {
    constexpr int g = static_cast<int>(G);
    fill_step<R, States, Mode::kStep, G>(modes[static_cast<int>(Mode::kStep)][g]);
    fill_step<R, States, Mode::kApart, G>(modes[static_cast<int>(Mode::kApart)][g]);
}

template <Dtype G>
constexpr void fill_other(Kernels& k) {
    constexpr int g = static_cast<int>(G);
    fill_modes<Sgd, Float32States, G>(k.other[static_cast<int>(Rule::kSgd)]);
    fill_modes<Momentum, Float32States, G>(k.other[static_cast<int>(Rule::kMomentum)]);
    fill_modes<Lion, Float32States, G>(k.other[static_cast<int>(Rule::kLion)]);
    fill_modes<Adagrad, Float32States, G>(k.other[static_cast<int>(Rule::kAdagrad)]);
    k.lamb_moments[g][static_cast<int>(Master::kSplit)] = lamb_moments_range<G, Master::kSplit>;
    constexpr Master kFull[] = {Master::kFloat32, Master::kEmitBfloat16, Master::kEmitFloat16};
    for (const Master m : kFull) {
        k.lamb_moments[g][static_cast<int>(m)] = lamb_moments_range<G, Master::kFloat32>;
    }
}

template <typename States>
constexpr void fill_states(Kernels& k) {
    k.save_states[static_cast<int>(States::kKind)] = save_states_range<States>;
    k.load_states[static_cast<int>(States::kKind)] = load_states_range<States>;
}

template <Dtype G>
constexpr void fill_dtype(Kernels& k) {
    constexpr int g = static_cast<int>(G);
    fill_modes<Adam, Float32States, G>(k.adam[static_cast<int>(StateKind::kFloat32)]);
    fill_modes<Adam, Bfloat16States, G>(k.adam[static_cast<int>(StateKind::kBfloat16)]);
    fill_modes<Adam, Int8States, G>(k.adam[static_cast<int>(StateKind::kInt8)]);
    fill_other<G>(k);
    k.sum_of_squares[g] = sum_range<G>;
    k.accumulate[g] = accumulate_range<G, Dtype::kFloat32>;
    k.accumulate_same[g] = accumulate_range<G, G>;
    k.convert[g][0] = convert_range<G, Dtype::kFloat32>;
    k.convert[g][1] = convert_range<G, Dtype::kBfloat16>;
    k.convert[g][2] = convert_range<G, Dtype::kFloat16>;
}

constexpr Kernels make_kernels() {
    Kernels k{};
    fill_dtype<Dtype::kFloat32>(k);
    fill_dtype<Dtype::kBfloat16>(k);
    fill_dtype<Dtype::kFloat16>(k);
    k.lamb_apply[static_cast<int>(Master::kSplit)] = lamb_apply_range<Master::kSplit>;
    k.lamb_apply[static_cast<int>(Master::kFloat32)] = lamb_apply_range<Master::kFloat32>;
    k.lamb_apply[static_cast<int>(Master::kEmitBfloat16)] = lamb_apply_range<Master::kEmitBfloat16>;
    k.lamb_apply[static_cast<int>(Master::kEmitFloat16)] = lamb_apply_range<Master::kEmitFloat16>;
    fill_states<Float32States>(k);
    fill_states<Bfloat16States>(k);
    fill_states<Int8States>(k);
    k.split = split_range;
    k.join = join_range;
    k.stream = stream_range;
    return k;
}
