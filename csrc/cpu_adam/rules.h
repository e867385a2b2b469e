// The arithmetic of each optimizer for one vector. Included after storage.h.
//
// A rule is made of the constants of kernels.h, in the order given there. `gradient` scales the gradient and
// adds an L2 term; `update` changes the states and returns the new parameter.

struct GradientTerms {
    Vec::F grad_scale, l2;
    bool has_l2;
    explicit GradientTerms(const float* c)
        : grad_scale(Vec::set(c[0])),
          l2(Vec::set(c[1])),
          has_l2(__builtin_bit_cast(std::uint32_t, c[1]) << 1 != 0) {}
    Vec::F gradient(Vec::F raw, Vec::F p) const {
        const Vec::F g = Vec::mulf(raw, grad_scale);
        return has_l2 ? Vec::fma(l2, p, g) : g;
    }
};

struct Adam : GradientTerms {
    static constexpr int kStates = 2;
    Vec::F decay, one_minus_beta1, one_minus_beta2, eps, neg_step, inv_sqrt_bc2;
    explicit Adam(const float* c)
        : GradientTerms(c),
          decay(Vec::set(c[2])),
          one_minus_beta1(Vec::set(c[3])),
          one_minus_beta2(Vec::set(c[4])),
          eps(Vec::set(c[5])),
          neg_step(Vec::set(c[6])),
          inv_sqrt_bc2(Vec::set(c[7])) {}
    Vec::F update(Vec::F p, Vec::F g, Vec::F (&s)[kStates]) const {
        s[0] = Vec::fma(one_minus_beta1, Vec::subf(g, s[0]), s[0]);
        s[1] = Vec::fma(one_minus_beta2, Vec::fms(g, g, s[1]), s[1]);
        const Vec::F denominator = Vec::fma(Vec::sqrtf(s[1]), inv_sqrt_bc2, eps);
        return Vec::fma(neg_step, Vec::divf(s[0], denominator), Vec::mulf(p, decay));
    }
};

// p -= lr * g
struct Sgd : GradientTerms {
    static constexpr int kStates = 0;
    Vec::F neg_lr;
    explicit Sgd(const float* c) : GradientTerms(c), neg_lr(Vec::set(c[2])) {}
    Vec::F update(Vec::F p, Vec::F g, Vec::F (&)[1]) const { return Vec::fma(neg_lr, g, p); }
};

struct Momentum : GradientTerms {
    static constexpr int kStates = 1;
    Vec::F neg_lr, keep, take, nesterov;
    bool is_nesterov;
    explicit Momentum(const float* c)
        : GradientTerms(c),
          neg_lr(Vec::set(c[2])),
          keep(Vec::set(c[3])),
          take(Vec::set(c[4])),
          nesterov(Vec::set(c[5])),
          is_nesterov(c[5] != 0.0f) {}
    Vec::F update(Vec::F p, Vec::F g, Vec::F (&s)[kStates]) const {
        s[0] = Vec::fma(keep, s[0], Vec::mulf(take, g));
        return Vec::fma(neg_lr, is_nesterov ? Vec::fma(nesterov, s[0], g) : s[0], p);
    }
};

struct Lion : GradientTerms {
    static constexpr int kStates = 1;
    Vec::F decay, neg_lr, one_minus_beta1, one_minus_beta2;
    explicit Lion(const float* c)
        : GradientTerms(c),
          decay(Vec::set(c[2])),
          neg_lr(Vec::set(c[3])),
          one_minus_beta1(Vec::set(c[4])),
          one_minus_beta2(Vec::set(c[5])) {}
    Vec::F update(Vec::F p, Vec::F g, Vec::F (&s)[kStates]) const {
        const Vec::F difference = Vec::subf(g, s[0]);
        const Vec::F direction = Vec::sign(Vec::fma(one_minus_beta1, difference, s[0]));
        s[0] = Vec::fma(one_minus_beta2, difference, s[0]);
        return Vec::fma(neg_lr, direction, Vec::mulf(p, decay));
    }
};

struct Adagrad : GradientTerms {
    static constexpr int kStates = 1;
    Vec::F neg_lr, eps;
    explicit Adagrad(const float* c) : GradientTerms(c), neg_lr(Vec::set(c[2])), eps(Vec::set(c[3])) {}
    Vec::F update(Vec::F p, Vec::F g, Vec::F (&s)[kStates]) const {
        s[0] = Vec::fma(g, g, s[0]);
        return Vec::fma(neg_lr, Vec::divf(g, Vec::addf(Vec::sqrtf(s[0]), eps)), p);
    }
};

// Adam's direction, whose length the norms of the parameter and of itself decide: see lamb.h.
struct Lamb : GradientTerms {
    Vec::F decay, one_minus_beta1, one_minus_beta2, eps, inv_bc1, inv_sqrt_bc2;
    explicit Lamb(const float* c)
        : GradientTerms(c),
          decay(Vec::set(c[2])),
          one_minus_beta1(Vec::set(c[3])),
          one_minus_beta2(Vec::set(c[4])),
          eps(Vec::set(c[5])),
          inv_bc1(Vec::set(c[6])),
          inv_sqrt_bc2(Vec::set(c[7])) {}
    void moments(Vec::F g, Vec::F& m, Vec::F& v) const {
        m = Vec::fma(one_minus_beta1, Vec::subf(g, m), m);
        v = Vec::fma(one_minus_beta2, Vec::fms(g, g, v), v);
    }
    Vec::F direction(Vec::F p, Vec::F m, Vec::F v) const {
        const Vec::F denominator = Vec::fma(Vec::sqrtf(v), inv_sqrt_bc2, eps);
        return Vec::fma(decay, p, Vec::divf(Vec::mulf(m, inv_bc1), denominator));
    }
};
