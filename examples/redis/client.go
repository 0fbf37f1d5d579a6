package main

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"
)

func main() {
	ctx := context.Background()
	tidegate := redis.NewClient(&redis.Options{Addr: "127.0.0.1:8083", MaxRetries: -1})
	decision, err := tidegate.Do(ctx, "TG.ACQUIRE", "per-user", "user123").Int64Slice()
	if err != nil {
		panic(err)
	}
	if decision[0] == 1 {
		fmt.Println("allowed,", decision[2], "left")
	} else {
		fmt.Println("denied, retry in", decision[3], "ms")
	}
}
