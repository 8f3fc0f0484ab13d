{{/* (dict "root" $ "service" "verifier" "number" 3 "kind" "StatefulSet"): how many pods, or with an autoscaler nothing: server-side
apply would take the number back at every upgrade. Until the autoscaler has set it, the live number is kept, which Helm set
before: without it there would be one pod. */}}
{{- define "draftwire.replicas" -}}
{{- if not (index .root.Values .service).autoscaling.enabled -}}
replicas: {{ .number }}
{{- else -}}
{{- $name := .objectName | default (include "draftwire.name" .) -}}
{{- with lookup (.apiVersion | default "apps/v1") (.kind | default "Deployment") .root.Release.Namespace $name -}}
{{- $isScaled := false -}}
{{- range .metadata.managedFields -}}
{{- if and (eq (.subresource | default "") "scale") (hasKey (dig "fieldsV1" "f:spec" dict .) "f:replicas") }}{{ $isScaled = true }}{{ end -}}
{{- end -}}
{{- if not (or $isScaled (kindIs "invalid" .spec.replicas)) -}}
replicas: {{ .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* (dict "root" $ "service" "drafter" "target" map "threshold" number "query" text): KEDA's object, which scales by a sum
over all pods. Autoscaling's values are those of the service. Removing a pod is slow, since sessions have to move. */}}
{{- define "draftwire.scaledObject" -}}
{{- with (index .root.Values .service).autoscaling -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "draftwire.metadata" $ | nindent 2 }}
spec:
  scaleTargetRef: {{ toJson $.target }}
  minReplicaCount: {{ .minReplicas }}
  maxReplicaCount: {{ .maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          stabilizationWindowSeconds: 600
          {{- with $.scaleDown }}
          policies: {{ toJson . }}
          {{- end }}
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ .prometheusAddress }}
        threshold: {{ $.threshold | quote }}
        query: {{ .query | default $.query | quote }}
        {{- with .authModes }}
        authModes: {{ . | quote }}
        {{- end }}
      {{- if .authenticationRef.name }}
      authenticationRef: {{ toJson .authenticationRef }}
      {{- end }}
{{- end -}}
{{- end }}
