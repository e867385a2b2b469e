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

// A running mean, s = beta * s + (1 - beta) * x. Its constant is 1 - beta; or -beta, -0 for 0, where beta <
// 0.5: there s + (1 - beta) * (x - s) would lose an x that is much smaller than s.
struct Mean {
    Vec::F beta, rest;
    bool forgets;
    explicit Mean(float c) : beta(Vec::set(-c)), forgets(__builtin_bit_cast(std::uint32_t, c) >> 31 != 0) {
        rest = Vec::set(forgets ? 1.0f + c : c);
    }
    Vec::F next(Vec::F s, Vec::F x) const {
        return forgets ? Vec::fma(beta, s, Vec::mulf(rest, x)) : Vec::fma(rest, Vec::subf(x, s), s);
    }
};

// A running mean of squares, by beta and 1 - beta. From |x| = 2^64 on, x * x is no number: so (1 - beta) * x
// comes first, as in torch.
struct MeanSquare {
    Vec::F beta, rest;
    MeanSquare(float b, float c) : beta(Vec::set(b)), rest(Vec::set(c)) {}
    Vec::F next(Vec::F s, Vec::F x) const { return Vec::fma(Vec::mulf(rest, x), x, Vec::mulf(beta, s)); }
};

struct Adam : GradientTerms {
    static constexpr int kStates = 2;
    Vec::F decay;
    Mean first;
    MeanSquare second;
    Vec::F eps, neg_step, inv_sqrt_bc2;
    explicit Adam(const float* c)
        : GradientTerms(c),
          decay(Vec::set(c[2])),
          first(c[3]),
          second(c[4], c[5]),
          eps(Vec::set(c[6])),
          neg_step(Vec::set(c[7])),
          inv_sqrt_bc2(Vec::set(c[8])) {}
    Vec::F update(Vec::F p, Vec::F g, Vec::F (&s)[kStates]) const {
        s[0] = first.next(s[0], g);
        s[1] = second.next(s[1], g);
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
    Vec::F decay, neg_lr;
    Mean ahead, kept;
    explicit Lion(const float* c)
        : GradientTerms(c), decay(Vec::set(c[2])), neg_lr(Vec::set(c[3])), ahead(c[4]), kept(c[5]) {}
    Vec::F update(Vec::F p, Vec::F g, Vec::F (&s)[kStates]) const {
        const Vec::F direction = Vec::sign(ahead.next(s[0], g));
        s[0] = kept.next(s[0], g);
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
    Vec::F decay;
    Mean first;
    MeanSquare second;
    Vec::F eps, inv_bc1, inv_sqrt_bc2;
    explicit Lamb(const float* c)
        : GradientTerms(c),
          decay(Vec::set(c[2])),
          first(c[3]),
          second(c[4], c[5]),
          eps(Vec::set(c[6])),
          inv_bc1(Vec::set(c[7])),
          inv_sqrt_bc2(Vec::set(c[8])) {}
    void moments(Vec::F g, Vec::F& m, Vec::F& v) const {
        m = first.next(m, g);
        v = second.next(v, g);
    }
    Vec::F direction(Vec::F p, Vec::F m, Vec::F v) const {
        const Vec::F denominator = Vec::fma(Vec::sqrtf(v), inv_sqrt_bc2, eps);
        return Vec::fma(decay, p, Vec::divf(Vec::mulf(m, inv_bc1), denominator));
    }
};
